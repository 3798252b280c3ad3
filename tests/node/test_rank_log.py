"""Tests of the logs of ranks: named by the rank's own number, because srun's task numbers are not reliable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import LocalRun

SAYS = "import os, sys\nprint('rank', os.environ['RANK'], flush=True)\nprint('aside', file=sys.stderr)\n"
COMPONENT = {
    "name": "data",
    "program": ["{python}", "-c", "print('component')"],
    "nodes": 1,
    "processes_per_node": 2,
    "srun": [],
}


def shim(run: LocalRun, word: str, log: Path, **env: str) -> None:
    """Run a process as srun starts it, with a task's number and the log that srun chose."""
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2", "HPCACCEL_ATTEMPT": "1",
    }  # fmt: skip
    with log.open("ab") as out:
        subprocess.run(
            [sys.executable, str(run.dir.node_program), word, str(run.dir.path)],
            env={**os.environ, **step, **env}, stdout=out, stderr=out, check=True, timeout=60,
        )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> LocalRun:
    run = LocalRun(tmp_path / "run", SAYS, ranks=2, launch={"backend": "slurm", "components": [COMPONENT]})
    run.dir.attempt(1).mkdir(parents=True, exist_ok=True)
    return run


def test_rank_writes_to_the_log_of_its_own_number(run: LocalRun) -> None:
    """In a heterogeneous job, srun of 26.11 uses numbers that are one too low, modulo 2**32 for rank 0."""
    folder = run.dir.attempt(1)
    for rank, wrong in (("0", "4294967295"), ("1", "0")):
        shim(run, "rank", folder / f"{wrong}.log", SLURM_PROCID=rank)
    assert run.dir.rank_log(1, 0).read_text() == "rank 0\naside\n"
    assert run.dir.rank_log(1, 1).read_text() == "rank 1\naside\n"
    assert (folder / "4294967295.log").read_text() == ""


def test_rank_appends_to_what_srun_wrote_to_its_log(run: LocalRun) -> None:
    log = run.dir.rank_log(1, 1)
    log.write_text("slurmstepd: error: a line of Slurm's\n")
    for _ in range(2):
        shim(run, "rank", log, SLURM_PROCID="1")
    assert log.read_text() == "slurmstepd: error: a line of Slurm's\n" + "rank 1\naside\n" * 2


def test_component_process_writes_to_the_log_of_its_own_number(run: LocalRun) -> None:
    folder = run.dir.attempt(1)
    names = {"HPCACCEL_COMPONENT": "data", "HPCACCEL_COMPONENT_JOB": "8"}
    for process in ("0", "1"):
        shim(run, "component", folder / "data.srun.log", SLURM_PROCID=process, **names)
    assert sorted(path.name for path in folder.glob("data*.log")) == ["data-0.log", "data-1.log", "data.srun.log"]
    assert (folder / "data-1.log").read_text() == "component\n"
    assert (folder / "data.srun.log").read_text() == ""
