"""Sweeps of the small GPT on a real Slurm, under preemptions, kills and requeues; the helpers are in sweeping.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .dev_cluster import Cluster
from .sweeping import (
    FAULTS,
    Sweeping,
    assert_as_accounted,
    assert_best_comes_again,
    assert_each_counted_once,
    assert_each_went_on,
    disturb,
)

Lease = Callable[[int], list[str]]


@pytest.fixture
def sweep(cluster: Cluster, lease: Lease, tmp_path: Path) -> Iterator[Callable[[int], Sweeping]]:
    made: list[Sweeping] = []

    def make(nodes: int) -> Sweeping:
        made.append(Sweeping(cluster, tmp_path, nodes=lease(nodes)))
        return made[-1]

    yield make
    for one in made:
        one.cancel()


def test_sweep_survives_a_requeue_and_a_killed_chooser(sweep: Callable[[int], Sweeping]) -> None:
    run = sweep(1)
    run.start("sweep.max_trials=3", "sweep.workers=2", "args.bytes=30000")
    disturb(run, ["scontrol requeue", "chooser killed"])
    run.wait_until_over(900)
    assert_each_counted_once(run, 3)
    assert assert_each_went_on(run) >= 1
    assert_as_accounted(run, seconds_each=1.0)


@pytest.mark.chaos
def test_sweep_survives_every_kind_of_fault(sweep: Callable[[int], Sweeping]) -> None:
    run = sweep(4)
    run.start("sweep.max_trials=48", "sweep.workers=4")
    disturb(run, list(FAULTS))
    run.wait_until_over(900)
    assert_each_counted_once(run, 48)
    assert assert_each_went_on(run) >= len(FAULTS) - 3  # some end early, before their ranks are back
    print("GPU-seconds, ours and Slurm's:", assert_as_accounted(run))
    assert_best_comes_again(run)
