"""Finding a checkpoint by name, path or step, and runs that branch from a checkpoint."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import is_pinned, manifest, pin
from hpcaccel.core.durable_files import read_json
from hpcaccel.errors import (
    CheckpointError,
    ClusterError,
    Damaged,
    RunNotFound,
    SlurmCommandError,
    SlurmUnreachable,
    SpecError,
    UserError,
)
from hpcaccel.submission import Run
from hpcaccel.submission.runs.checkpoints import find_checkpoint, find_origin, find_place
from hpcaccel.submission.submit.prepare import prepare
from tests.submission.conftest import Project


def make(directory: Path, step: int) -> Path:
    """A checkpoint whose manifest and sizes are valid."""
    path = directory / checkpoint_files.checkpoint_name(step)
    path.mkdir(parents=True)
    data = os.urandom(100)
    (path / "rank_00000.bin").write_bytes(data)
    files = {"rank_00000.bin": {"bytes": 100, "crc32": f"{zlib.crc32(data):08x}"}}
    (path / checkpoint_files.MANIFEST).write_bytes(manifest.seal({"version": 1, "step": step, "files": files}))
    return path


def damage(path: Path) -> None:
    (path / "rank_00000.bin").write_bytes(b"")


@pytest.fixture
def run(project: Project) -> Run:
    """A run with checkpoints of three steps."""
    run = project.queue("name=first")
    assert isinstance(run, Run)
    for step in (100, 200, 300):
        make(run.dir.checkpoints, step)
    return run


def spec_of(run: Any) -> dict[str, Any]:
    document = read_json(run.dir.spec)
    assert document is not None
    spec: dict[str, Any] = document["spec"]
    return spec


def test_checkpoint_is_found_by_run_name_path_or_step(run: Run, project: Project) -> None:
    there = run.dir.checkpoints
    for word, step in [
        ("first", 300),
        ("first@200", 200),
        (f"{run.run_id}@step_00000100", 100),
        (str(run.path), 300),
        (f"{run.path}@100", 100),
        (str(there), 300),
        (str(there / "step_00000200"), 200),
        (os.path.relpath(there / "step_00000200"), 200),
    ]:
        assert find_checkpoint(word) == there / checkpoint_files.checkpoint_name(step), word
    assert find_place("first") == there
    (project.path / "first").mkdir()  # a folder with the run's name and no checkpoint
    assert find_checkpoint("first@100").name == "step_00000100"
    origin = find_origin("first@200")
    assert (origin.run_id, origin.step) == (run.run_id, 200)
    lone = make(project.path / "aside", 7)
    assert find_origin("aside").run_id is None
    assert find_origin(lone).step == 7


def test_newest_good_checkpoint_is_chosen_and_a_damaged_named_one_refused(run: Run) -> None:
    there = run.dir.checkpoints
    damage(there / "step_00000300")
    assert find_checkpoint("first").name == "step_00000200"
    with pytest.raises(Damaged, match=r"step_00000300/rank_00000\.bin has 0 bytes"):
        find_checkpoint("first@300")
    with pytest.raises(Damaged, match=r"step_00000300/rank_00000\.bin has 0 bytes"):
        find_origin(there / "step_00000300")
    for step in (100, 200):
        damage(there / checkpoint_files.checkpoint_name(step))
    with pytest.raises(CheckpointError, match=r"no intact checkpoint in .*, only damaged ones: .*step_00000300"):
        find_checkpoint("first")


def test_unknown_checkpoint_is_refused_with_the_reason(run: Run, project: Project) -> None:
    for word, error, message in [
        ("first@150", CheckpointError, r"no checkpoint of step 150 in .* \(steps: 100, 200, 300\)"),
        ("first@half", UserError, "the part after @ must be a step, as in first@1200, not 'half'"),
        ("third", RunNotFound, "There is no path 'third' either"),
        ("./third", CheckpointError, "does not exist"),
        (str(project.path), CheckpointError, "there is no checkpoint in"),
        (f"{run.dir.checkpoints}/step_00000100@100", CheckpointError, "is a single checkpoint: remove @100 from"),
    ]:
        with pytest.raises(error, match=message):
            find_checkpoint(word)


def test_branch_starts_from_its_checkpoint_and_pins_it(run: Run, project: Project) -> None:
    branch = project.queue("name=second", from_run="first@200")
    path = run.dir.checkpoints / "step_00000200"
    assert spec_of(branch)["checkpoint"]["resume"] == str(path)
    assert f"resume: {path}" in branch.dir.spec_yaml.read_text()
    assert branch.record.branched_from == {"checkpoint": str(path), "step": 200, "run_id": run.run_id}
    assert json.loads((path / checkpoint_files.PINNED).read_text())["why"] == f"run {branch.run_id} branches from it"
    assert run.record.branched_from is None
    tasks = project.queue("name=third", grid=["args.lr=1,2"], from_run="first")
    for index in (0, 1):
        task = tasks.dir.task(index)
        assert json.loads(task.spec.read_text())["spec"]["checkpoint"]["resume"].endswith("step_00000300")
        assert json.loads(task.record.read_text())["branched_from"]["step"] == 300


@pytest.mark.parametrize("error", [ClusterError("no"), SlurmUnreachable(["sbatch"], 1, "no")])
def test_failed_submission_pins_nothing(
    run: Run, project: Project, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(project.slurm, "sbatch", refuse)
    pin(run.dir.checkpoints / "step_00000100", why="mine")
    for step in (100, 200):
        with pytest.raises(type(error)):
            project.queue(from_run=f"first@{step}")
    assert [is_pinned(path) for _, path in checkpoint_files.step_directories(run.dir.checkpoints)] == [
        False,
        False,
        True,
    ]


def test_resubmission_replaces_the_pin_of_a_run_without_a_job(
    run: Run, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object, **__: object) -> str:
        raise SlurmCommandError(["sbatch"], 1, "Socket timed out")

    path = run.dir.checkpoints / "step_00000200"
    with monkeypatch.context() as patch:
        patch.setattr(project.slurm, "sbatch", silent)
        with pytest.raises(SlurmCommandError):
            project.queue(from_run="first@200")
    assert is_pinned(path)
    monkeypatch.setattr("hpcaccel.submission.jobs.recovery.SETTLING_SECONDS", -1.0)
    branch = project.queue(from_run="first@200")
    assert json.loads((path / checkpoint_files.PINNED).read_text())["why"] == f"run {branch.run_id} branches from it"


def test_from_conflicts_with_checkpoint_resume(run: Run, project: Project) -> None:
    with pytest.raises(SpecError, match=r"checkpoint\.resume is 'never', and --from is .*@300"):
        project.queue("checkpoint.resume=never", from_run="first")


def test_checkpoint_of_an_unwritable_run_is_not_pinned_but_warned_about(
    run: Run, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    prepared = prepare("job.yaml", cluster="slurm", slurm=project.slurm, from_run="first")
    assert any("the run that saved it may delete it before" in sentence for sentence in prepared.advice)
    project.queue(from_run="first")
    assert not is_pinned(run.dir.checkpoints / "step_00000300")
