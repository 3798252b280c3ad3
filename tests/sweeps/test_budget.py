"""Compute time used by a sweep, and when its budget allows no further trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.core.durable_files import append_line
from hpcaccel.core.records import WorkerEnd, WorkerSeen, WorkerStart, WorkerTaken, to_dict
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.sweeps.budget import Budget, in_hours, too_small, typical
from hpcaccel.sweeps.compute_account import ComputeAccount


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    sweep = SweepDir(tmp_path / "20261120-153012-4f2a")
    sweep.create()
    return sweep


def write(sweep: SweepDir, worker: int, *lines: WorkerStart | WorkerSeen | WorkerTaken | WorkerEnd) -> None:
    sweep.worker(worker).prepare()
    for line in lines:
        append_line(sweep.worker(worker).account, to_dict(line))


def start(at: float, *, gpus: int = 4, granted: float | None = None) -> WorkerStart:
    return WorkerStart(time=at, job_id="46_0", gpus=gpus, allocated_at=granted)


def end(at: float) -> WorkerEnd:
    return WorkerEnd(time=at, reason="preempted", decision="requeue")


def test_gpu_seconds_count_every_gpu_from_allocation_to_end(sweep: SweepDir) -> None:
    write(sweep, 0, start(1010, granted=1000), WorkerSeen(time=1060), end(1100), start(2000), end(2050))
    write(sweep, 1, start(1000, gpus=2), end(1010))
    assert ComputeAccount(sweep).read().gpu_seconds(now=9000) == 100 * 4 + 50 * 4 + 10 * 2


def test_silent_worker_counts_to_its_last_heartbeat_and_a_live_one_to_now(sweep: SweepDir) -> None:
    write(sweep, 0, start(1000, gpus=1), WorkerSeen(time=1060))
    account = ComputeAccount(sweep).read()
    assert account.gpu_seconds(now=1100) == 100
    assert account.gpu_seconds(now=5000) == 60


def test_time_after_slurm_takes_the_allocation_does_not_count(sweep: SweepDir) -> None:
    write(sweep, 0, start(1000, gpus=1), WorkerTaken(time=1050), WorkerSeen(time=1058), end(1060), start(1100, gpus=1))
    account = ComputeAccount(sweep).read()
    assert account.gpu_seconds(now=1130) == 50 + 30
    assert account.is_fresh(0, now=1130)


def test_allocation_ends_when_the_worker_starts_a_new_one(sweep: SweepDir) -> None:
    write(sweep, 0, start(1000, gpus=1), WorkerSeen(time=1020), start(1100, gpus=1))
    assert ComputeAccount(sweep).read().gpu_seconds(now=1130) == 20 + 30


def test_account_reads_only_new_lines(sweep: SweepDir) -> None:
    write(sweep, 0, start(1000, gpus=1))
    account = ComputeAccount(sweep).read()
    write(sweep, 0, end(1500))
    assert account.read().gpu_seconds(now=9000) == 500
    assert len(account.held[0]) == 1


def test_allocation_without_gpus_counts_each_rank_as_one(sweep: SweepDir) -> None:
    write(sweep, 0, start(1000, gpus=0), end(1010))
    assert ComputeAccount(sweep, ranks=8).read().gpu_seconds() == 80


def test_trial_may_start_if_it_and_the_running_trials_fit_the_budget() -> None:
    budget = Budget(max_gpu_hours=1)
    assert budget.against_a_trial(2400, usual=600, running=[0]) == ""
    assert budget.against_a_trial(2400, usual=600, running=[500, 900]) == ""
    refusal = budget.against_a_trial(2401, usual=600, running=[0])
    assert "max_gpu_hours is 1" in refusal
    assert "another 0.17 GPU-hours" in refusal


def test_used_up_budget_is_reported_and_no_budget_is_never_used_up() -> None:
    assert Budget(max_gpu_hours=1).is_used_up(3600)
    assert "have been used" in Budget(max_gpu_hours=1).against_a_trial(3600, usual=0, running=[])
    assert not Budget(max_gpu_hours=None).is_used_up(1e12)
    assert Budget(max_gpu_hours=None).against_a_trial(1e12, usual=1e12, running=[1e12]) == ""


def test_trial_may_start_while_the_typical_cost_is_unknown() -> None:
    assert typical([]) == 0
    assert Budget(max_gpu_hours=0.001).against_a_trial(0, usual=typical([]), running=[]) == ""


def test_error_for_a_budget_below_one_trial_estimates_the_cost() -> None:
    text = too_small(Budget(max_gpu_hours=0.5), sweep="20261120-1", trial=3, used=1800, step=100, total=400)
    assert "max_gpu_hours is 0.5, which is too little for one trial" in text
    assert "trial 3 has used 0.5 GPU-hours for 100 of 400 steps, so it would need about 2 GPU-hours" in text
    assert "has not finished" in too_small(
        Budget(max_gpu_hours=0.5), sweep="20261120-1", trial=3, used=1800, step=None, total=None
    )


def test_gpu_hours_keep_significant_digits() -> None:
    assert (in_hours(36), in_hours(3600 * 12.34)) == ("0.01 GPU-hours", "12.3 GPU-hours")
