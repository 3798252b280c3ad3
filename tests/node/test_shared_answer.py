"""What a trial's supervisor need not ask Slurm for: times its host knows, and whether a good end is one."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from hpcaccel.node.allocation import Situation
from hpcaccel.node.shared_answer import OLDEST_SECONDS, read_answer, write_answer
from hpcaccel.node.stopping import Inquiry
from hpcaccel.node.trial import _OF_SLURM

RUNS = Situation(running=True, submit_time=1.0, start_time=2.0, end_time=3.0)


class Asked:
    """An allocation that counts."""

    def __init__(self) -> None:
        self.count = 0

    def situation(self, *, patient: bool = True) -> Situation:
        self.count += 1
        return RUNS


def test_times_come_from_the_host_and_news_from_slurm(tmp_path: Path) -> None:
    file, slurm = tmp_path / "job.json", Asked()
    inquiry = Inquiry(slurm, told=lambda: read_answer(file))  # type: ignore[arg-type]
    inquiry.look()
    assert slurm.count == 1  # nobody has asked before
    asked = time.time() + 1
    write_answer(file, dataclasses.replace(RUNS, end_time=77.0), asked=asked)
    inquiry.look()
    assert (slurm.count, inquiry.end_time, inquiry.asked) == (1, 77.0, asked)
    inquiry.ask()
    assert slurm.count == 2


def test_an_old_answer_and_one_that_takes_the_job_away_are_no_answer(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    write_answer(file, RUNS, asked=time.time() - OLDEST_SECONDS - 1)
    assert read_answer(file) is None
    for changed in ({"preempted": True}, {"running": False}, {"known": False}):
        write_answer(file, RUNS, asked=time.time())
        assert read_answer(file) is not None
        write_answer(file, dataclasses.replace(RUNS, **changed), asked=time.time())  # type: ignore[arg-type]
        assert read_answer(file) is None


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
def test_slurms_own_lines(line: str, of_slurm: bool) -> None:
    assert bool(_OF_SLURM.search(line)) is of_slurm
