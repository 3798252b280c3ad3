"""Real ranks are stopped during a training, resume, and reproduce the undisturbed run bit by bit."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcaccel import checkpoint_files
from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import StopRequest
from tests.runtime.ranks import Ranks, make_run, metrics, outcome, run_ranks


@dataclass(frozen=True)
class Undisturbed:
    """A training without a stop."""

    result: dict[str, Any]
    run: RunDir


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Undisturbed]:
    """Makes undisturbed trainings, each only once."""

    @functools.cache
    def make(*arguments: str, size: int = 2) -> Undisturbed:
        run = make_run(tmp_path_factory.mktemp("undisturbed") / "run", checkpoint={"every_steps": 8, "keep": None})
        ended = run_ranks("train.py", arguments, size=size, run=run)
        assert ended.codes == [0] * size, ended.outputs[0]
        return Undisturbed(ended.result(), run)

    return make


def stopped_and_resumed(run: RunDir, arguments: list[str], *, kill_at: str, size: int = 2) -> dict[str, Any]:
    """The result of a training that a signal stopped and a second attempt resumed."""
    first = run_ranks("train.py", [*arguments, "--kill-at", kill_at], size=size, run=run)
    assert first.codes == [85] * size, first.outputs[0]
    assert first.outputs[0].count("stopping at step") == 1
    left = outcome(run)
    assert left is not None
    assert left["resume"]
    assert left["checkpoint"] == checkpoint_files.checkpoint_name(left["step"])
    second = run_ranks("train.py", [*arguments, "--kill-at", kill_at], size=size, run=run, attempt=2)
    assert second.codes == [0] * size, second.outputs[0]
    assert f"resumed at step {left['step']}" in second.outputs[0]
    return second.result()


@pytest.mark.parametrize(
    ("arguments", "kill_at", "size"),
    [
        (["--strategy", "ddp"], "9:1:SIGUSR2", 2),
        pytest.param(
            ["--strategy", "ddp", "--accumulate", "2", "--workers", "2"], "5:0:SIGTERM", 2, marks=pytest.mark.chaos
        ),
        (["--strategy", "fsdp", "--accumulate", "2"], "4:0:SIGUSR2", 2),
        pytest.param(
            ["--strategy", "fsdp", "--workers", "2", "--precision", "bf16"], "13:1:SIGTERM", 2, marks=pytest.mark.chaos
        ),
        pytest.param(["--strategy", "ddp"], "5:3:SIGTERM", 4, marks=pytest.mark.chaos),
        (["--strategy", "ddp"], "17:0:SIGTERM", 1),
        pytest.param(["--verbs", "steps"], "9:1:SIGUSR2", 2, marks=pytest.mark.chaos),
        pytest.param(["--verbs", "none"], "9:1:SIGUSR2", 2, marks=pytest.mark.chaos),
    ],
    ids=["ddp", "ddp-accumulate-workers", "fsdp-accumulate", "fsdp-bf16-workers", "ddp-4", "single", "steps", "names"],
)
def test_resumed_training_equals_the_undisturbed_one(
    tmp_path: Path, undisturbed: Callable[..., Undisturbed], arguments: list[str], kill_at: str, size: int
) -> None:
    """With dropout, shuffling, augmentation from three generators, clipping and a schedule; also in a script that uses
    only Accelerate's names."""
    expected = undisturbed(*arguments, size=size)
    disturbed = make_run(tmp_path / "disturbed")
    result = stopped_and_resumed(disturbed, arguments, kill_at=kill_at, size=size)
    assert result == expected.result
    assert metrics(disturbed) == metrics(expected.run)
    assert metrics(disturbed, "x") == metrics(expected.run, "x")
    assert sorted(metrics(disturbed)) == list(range(1, result["step"] + 1))


def test_undisturbed_run_records_its_start_and_outcome(undisturbed: Callable[..., Undisturbed]) -> None:
    run = undisturbed("--strategy", "ddp").run
    progress = read_json(run.progress(1))
    assert progress is not None
    assert (progress["resumed_step"], progress["resumed_from"], progress["total_steps"]) == (0, None, 21)
    losses = metrics(run)
    assert outcome(run) == {
        "version": 1,
        "reason": "completed",
        "step": 21,
        "checkpoint": "step_00000021",
        "resume": False,
        "first_loss": losses[1],
        "last_loss": losses[21],
    }
    assert [found.step for found in checkpoint_files.committed(run.checkpoints)] == [8, 16, 21]


def test_resumed_completed_run_runs_only_the_code_after_the_loop(
    undisturbed: Callable[..., Undisturbed],
) -> None:
    first = undisturbed("--strategy", "ddp")
    before = [found.step for found in checkpoint_files.committed(first.run.checkpoints)]
    again = run_ranks("train.py", run=first.run, attempt=2)
    assert again.codes == [0, 0]
    assert again.result() == first.result
    assert [found.step for found in checkpoint_files.committed(first.run.checkpoints)] == before


def test_training_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    first = run_ranks("train.py", ["--kill-at", "9:1:SIGUSR2"], run=run)
    assert first.codes == [85, 85]
    second = run_ranks("train.py", size=1, run=run, attempt=2)
    assert second.codes == [0], second.outputs[0]
    assert "state-exact (world_size: 2 at the save, 1 now)" in second.outputs[0]
    # An epoch has 13 raw batches: 10 steps of two ranks are one epoch and 6 batches of the second.
    assert second.result()["step"] == 10 + 7 + 13


@pytest.mark.parametrize("early", ["0:SIGTERM", "1:SIGUSR2"])
def test_signal_before_the_accelerator_stops_before_the_first_step(tmp_path: Path, early: str) -> None:
    run = make_run(tmp_path / "run")
    first = Ranks("train.py", "--early", early, size=2, run=run, blocked=True).wait()
    assert first.codes == [85, 85], first.outputs[0]
    left = outcome(run)
    assert left is not None
    assert (left["step"], left["checkpoint"], left["resume"]) == (0, None, True)
    assert metrics(run) == {}
    assert run_ranks("train.py", run=run, attempt=2).result()["step"] == 21


def test_signal_while_a_later_attempt_starts_loses_no_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert run_ranks("train.py", ["--kill-at", "9:1:SIGUSR2"], run=run).codes == [85, 85]
    second = Ranks("train.py", "--early", "1:SIGTERM", size=2, run=run, attempt=2, blocked=True).wait()
    assert second.codes == [85, 85], second.outputs[0]
    left = outcome(run, 2)
    assert left is not None
    assert (left["step"], left["checkpoint"], left["resume"]) == (10, "step_00000010", True)
    assert run_ranks("train.py", run=run, attempt=3).result()["step"] == 21


def request(run: RunDir, reason: str, then: str) -> None:
    path = run.stop(1)
    path.parent.mkdir(parents=True)
    write_json(path, to_dict(StopRequest(reason=reason, then=then, time=time.time())))  # type: ignore[arg-type]


def test_outcome_has_the_supervisors_stop_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    request(run, "time_limit", "pause")
    assert run_ranks("train.py", ["--kill-at", "3:0:SIGUSR2"], run=run).codes == [85, 85]
    left = outcome(run)
    assert left is not None
    assert (left["reason"], left["step"], left["resume"]) == ("time_limit", 4, True)


@pytest.mark.parametrize(("reason", "kept"), [("stop", "step_00000004"), ("pruned", None)])
def test_final_stop_ends_the_loop_and_runs_the_code_after_it(tmp_path: Path, reason: str, kept: str | None) -> None:
    run = make_run(tmp_path / "run")
    request(run, reason, "finish")
    ended = run_ranks("train.py", ["--kill-at", "3:1:SIGUSR2"], run=run)
    assert ended.codes == [0, 0], ended.outputs[0]
    assert ended.result()["step"] == 4
    assert ended.result()["stopped"]
    left = outcome(run)
    assert left is not None
    assert (left["reason"], left["step"], left["checkpoint"], left["resume"]) == ("completed", 4, kept, False)
    assert [path.name for path in run.checkpoints.iterdir()] == ([kept] if kept else [])


def test_run_resumes_from_the_last_checkpoint_after_an_exception(
    tmp_path: Path, undisturbed: Callable[..., Undisturbed]
) -> None:
    run = make_run(tmp_path / "run", checkpoint={"every_steps": 4})
    failed = run_ranks("train.py", ["--fail-at", "6"], run=run)
    assert failed.codes == [1, 1]
    assert "ValueError: as told" in failed.outputs[0]
    assert outcome(run) is None
    expected = undisturbed("--strategy", "ddp")
    again = run_ranks("train.py", run=run, attempt=2)
    assert "resumed at step 4" in again.outputs[0]
    assert again.result() == expected.result
    assert metrics(run) == metrics(expected.run)


def test_ranks_with_unequal_numbers_of_steps_end_together(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", checkpoint={"every_steps": 2, "keep": None})
    ended = run_ranks("uneven.py", run=run)
    assert ended.codes == [0, 0], ended.outputs
    assert "rank 0 did 3 steps" in ended.outputs[0]
    assert "rank 1 did 7 steps" in ended.outputs[1]
    assert [found.step for found in checkpoint_files.committed(run.checkpoints)] == [2, 4, 6, 7]


def test_stop_reaches_a_rank_that_has_left_its_loop(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    ended = run_ranks("uneven.py", ["--kill-at", "4"], run=run)
    assert ended.codes == [85, 85], ended.outputs
    left = outcome(run)
    assert left is not None
    assert left["resume"]
    assert [found.step for found in checkpoint_files.committed(run.checkpoints)] == [6]


def test_ranks_with_srun_variables_find_each_other(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    by_slurm = run_ranks("train.py", ["--epochs", "1"], run=run, launcher="srun")
    assert by_slurm.codes == [0, 0], by_slurm.outputs[0]
    assert by_slurm.result()["step"] == 7


def test_training_without_a_run_directory_warns_that_nothing_is_saved() -> None:
    ended = run_ranks("train.py", ["--epochs", "1"])
    assert ended.codes == [0, 0], ended.outputs[0]
    assert [output.count("nothing will be saved") for output in ended.outputs] == [1, 0], "rank 0 warns"
    assert json.loads(ended.outputs[0].splitlines()[-1])["step"] == 7


def test_tutorial_loops_resume_with_the_remaining_samples(tmp_path: Path) -> None:
    """With and without skip_first_batches, in the middle of an epoch and at its end."""
    ended = run_ranks("tutorial.py", [str(tmp_path)])
    assert ended.codes == [0, 0], ended.outputs
    told = ended.result()
    assert {name: value[:2] for name, value in told.items()} == {name: [True, True] for name in told}
    assert {name: value[2] for name, value in told.items()} == {
        "middle, skip": 15,
        "middle, plain": 15,
        "end of an epoch, skip": 12,
        "end of an epoch, plain": 12,
        "later, skip": 11,
        "later, plain": 11,
    }
    alone = run_ranks("tutorial.py", [str(tmp_path), "--from-size", "2"], size=1)
    assert alone.codes == [0], alone.outputs
    rest = [sample for step in alone.result()["other size"][:6] for sample in step]
    assert len(set(rest)) == 12, "half of the epoch is left, and comes once"
