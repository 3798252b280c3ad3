"""Tests of what a trial's supervisor knows without querying Slurm: the shared job status, and Slurm's lines in logs."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.allocation import JobStatus
from hpcaccel.node.allocation.scheduler_view import (
    FRESH_SECONDS,
    OLDEST_SECONDS,
    SchedulerView,
    read_shared_status,
    write_shared_status,
)
from hpcaccel.node.failures.classify_logs import slurm_intervened

RUNS = JobStatus(running=True, submit_time=1.0, start_time=2.0, end_time=3.0)


class Asked:
    """An allocation that counts its queries."""

    status_is_free = False

    def __init__(self) -> None:
        self.count = 0

    def status(self, *, patient: bool = True) -> JobStatus:
        self.count += 1
        return RUNS


def test_refresh_reads_the_shared_status_and_query_calls_slurm(tmp_path: Path) -> None:
    file, slurm = tmp_path / "job.json", Asked()
    scheduler = SchedulerView(slurm, shared=lambda: read_shared_status(file))  # type: ignore[arg-type]
    scheduler.refresh()
    assert slurm.count == 1  # no shared status yet
    asked = time.time() + 1
    write_shared_status(file, dataclasses.replace(RUNS, end_time=77.0), queried_at=asked)
    scheduler.refresh()
    assert (slurm.count, scheduler.end_time, scheduler.queried_at) == (1, 77.0, asked)
    scheduler.query()
    assert slurm.count == 2


def test_refresh_uses_a_status_of_the_last_seconds_of_a_running_job() -> None:
    slurm = Asked()
    scheduler = SchedulerView(slurm)  # type: ignore[arg-type]
    scheduler.query()
    scheduler.refresh()
    assert slurm.count == 1
    scheduler.queried_at -= FRESH_SECONDS + 1
    scheduler.refresh()
    assert slurm.count == 2


def test_old_preempted_or_ended_shared_status_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    write_shared_status(file, RUNS, queried_at=time.time() - OLDEST_SECONDS - 1)
    assert read_shared_status(file) is None
    changes: list[dict[str, Any]] = [{"preempted": True}, {"running": False}]
    for changed in changes:
        write_shared_status(file, RUNS, queried_at=time.time())
        assert read_shared_status(file) is not None
        write_shared_status(file, dataclasses.replace(RUNS, **changed), queried_at=time.time())
        assert read_shared_status(file) is None


def test_unknown_status_does_not_replace_the_shared_one(tmp_path: Path) -> None:
    file, asked = tmp_path / "job.json", time.time()
    write_shared_status(file, RUNS, queried_at=asked)
    write_shared_status(file, JobStatus(running=False, known=False), queried_at=asked + 1)
    told = read_shared_status(file)
    assert told is not None
    assert (told.status, told.queried_at) == (RUNS, asked)


@pytest.mark.parametrize(
    ("line", "of_slurm"),
    [
        ("slurmstepd-n20: error: *** STEP 91.0 ON n20 CANCELLED AT 2026-11-22T15:04:11 ***", True),
        (
            "[2026-11-22T12:15:34.782] error: *** JOB 27 ON eq1 CANCELLED AT 2026-11-22T12:15:34 DUE to SIGNAL "
            "Terminated ***",
            True,
        ),
        ("srun: error: Node failure on n2", True),
        ("srun: Force Terminated StepId=5.0", True),
        ("srun: job 5 queued and waiting for resources", False),
        ("the order was CANCELLED AT noon", False),
    ],
)
def test_lines_of_slurm_are_recognized_in_a_log(tmp_path: Path, line: str, of_slurm: bool) -> None:
    assert slurm_intervened(with_logs(tmp_path, rank=f"before\n{line}\nbehind\n"), 1) is of_slurm


PREEMPTED = "slurmstepd-n20: error: *** STEP 91.0 ON n20 CANCELLED AT 2026-11-22T15:04:11 DUE TO PREEMPTION ***\n"
NOISE = "the program prints this line\n"
NODE = "srun: error: Node failure on n2\n"
BEGINS = "hpcaccel: 2026-11-22T15:00:00 attempt {}: ranks: 1\n"


@pytest.mark.parametrize(
    ("rank", "batch", "spoke"),
    [
        (PREEMPTED + NOISE * 100_000, "", True),  # far longer than the part at the end of a log that is read
        (NOISE * 50_000 + PREEMPTED + NOISE * 50_000, "", True),
        ("\r 7% done" * 400_000 + PREEMPTED, "", True),  # a line that does not end
        ("." * 5_000_000 + "srun: error", "", False),
        ("\r 7% done" * 400_000, "", False),
        (NOISE * 100_000, "", False),
        (NOISE, BEGINS.format(1) + NODE + NOISE * 100_000, True),
        (NOISE, BEGINS.format(0) + NODE + NOISE * 100_000 + BEGINS.format(1), False),
    ],
)
def test_lines_of_slurm_are_found_anywhere_in_an_attempts_logs(
    tmp_path: Path, rank: str, batch: str, spoke: bool
) -> None:
    assert slurm_intervened(with_logs(tmp_path, rank=rank, batch=batch), 1) is spoke


def with_logs(path: Path, *, rank: str, batch: str = "") -> RunDir:
    run = RunDir(path / "run")
    run.create()
    run.attempt(1).mkdir()
    run.rank_log(1, 0).write_bytes(rank.encode())
    if batch:
        run.slurm_log.write_text(batch)
    return run
