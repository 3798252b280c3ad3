"""The launch section of spec.json: it is read back as stored, and one of another version is refused with one line."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.launch_spec import (
    LaunchComponent,
    LaunchContainer,
    LaunchSpec,
    LaunchStage,
    LaunchWatch,
    RestartPolicy,
    find_launch,
    read_launch,
)
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunDirectoryError
from hpcaccel.spec.job.resilience_fields import ResilienceSection
from hpcaccel.submission.jobs.run_state import read_record

FULL = LaunchSpec(
    kind="program", program=["{python}", "train.py"], python="python3", pythonpath=["/code"], workdir="/work",
    backend="slurm", nodes=2, ranks_per_node=4, stop="signals", stop_is_default=True, loader_shield="/shield",
    bridge="/bridge",
    srun=["--mpi=none"], share_gpus=True, setup_per_node=["module load x"], time_limit_seconds=60, warning_seconds=7,
    launcher="torchrun",
    container=LaunchContainer(image="/x.sif", runtime="apptainer", mounts=["/a:/a"], workdir="/", gpus=True, key="k"),
    components=[LaunchComponent(name="data", program=["serve"], nodes=1, processes_per_node=2, srun=["--exact"])],
    after=[{"kind": "afterok", "run": "/runs/a"}], stage=LaunchStage(sources=["/d"], keep=True),
    watch=LaunchWatch(glob="/out/*", complete="done", step=r"(\d+)$"), resume_args=["--load", "{newest}"],
    resilience=RestartPolicy(warning_seconds=7, chain=3),
)  # fmt: skip
REQUIRED = ["kind", "program", "workdir", "backend", "nodes", "ranks_per_node", "stop"]


def stored(path: Path, launch: dict[str, Any], **resilience: Any) -> RunDir:
    run = RunDir(path / "run")
    run.create()
    write_json(run.spec, {"version": 1, "spec": {"resilience": resilience}, "launch": launch})
    return run


def test_stored_launch_spec_is_read_back(tmp_path: Path) -> None:
    assert read_launch(stored(tmp_path, FULL.to_dict(), chain=3)) == FULL
    assert {one.name for one in fields(LaunchSpec) if one.name not in ("resilience", "notify")} == FULL.to_dict().keys()


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    launch = {**FULL.to_dict(), "news": 1, "stage": {"sources": ["/d"], "keep": True, "news": 2}}
    assert read_launch(stored(tmp_path, launch, chain=3, news=3)) == FULL


@pytest.mark.parametrize("name", REQUIRED)
def test_launch_spec_without_a_required_field_is_refused(tmp_path: Path, name: str) -> None:
    launch = FULL.to_dict()
    del launch[name]
    run = stored(tmp_path, launch)
    with pytest.raises(
        RunDirectoryError, match=re.escape(f"{run.spec} was written by an incompatible version of hpcaccel (")
    ) as raised:
        read_launch(run)
    assert repr(name) in str(raised.value)


def test_launch_spec_with_only_the_required_fields_is_read(tmp_path: Path) -> None:
    launch = {key: value for key, value in FULL.to_dict().items() if key in REQUIRED}
    found = read_launch(stored(tmp_path, launch))
    assert (found.program, found.ranks, found.container, found.after) == (FULL.program, 8, None, [])
    assert found.to_dict().keys() == FULL.to_dict().keys()


def test_spec_json_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    run = stored(tmp_path, FULL.to_dict())
    write_json(run.spec, {"version": 2, "spec": {}, "launch": FULL.to_dict()})
    with pytest.raises(RunDirectoryError, match=r"spec.json has format version 2, written by a newer hpcaccel"):
        read_launch(run)


def test_record_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    run = stored(tmp_path, FULL.to_dict())
    write_json(run.record, {"version": 2, "run_id": "a"})
    with pytest.raises(RunDirectoryError, match=r"record.json has format version 2.*Upgrade hpcaccel"):
        read_record(run)


def test_run_without_spec_json_has_no_launch_spec(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert find_launch(run) is None
    with pytest.raises(RunDirectoryError, match="not the directory of a submitted run"):
        read_launch(run)


def test_restart_policy_matches_fields_and_defaults_of_resilience() -> None:
    section = ResilienceSection().model_dump()
    assert {one.name for one in fields(RestartPolicy)} == section.keys()
    added_later = {"preflight", "max_excluded", "warm_restart"}  # runs of earlier releases have none of them
    assert {key: value for key, value in section.items() if key not in added_later} == {
        one.name: getattr(RestartPolicy(), one.name) for one in fields(RestartPolicy) if one.name not in added_later
    }
