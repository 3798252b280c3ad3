"""Runs with repeated faults at random moments; `make chaos N=…` has the long schedules."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from .chaos import FAULTS, Chaos, attack, disturb, faults_of, schedule
from .dev_cluster import Cluster
from .scenario import Scenario


def test_schedule_has_every_kind_of_fault_before_repeating_any() -> None:
    names = schedule(2 * len(FAULTS), seed=3)
    assert set(names[: len(FAULTS)]) == set(names[len(FAULTS) :]) == set(FAULTS)
    assert schedule(5, seed=3) == names[:5]
    assert schedule(5, seed=4) != names[:5]


@pytest.mark.chaos
def test_run_survives_three_faults(
    cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path, assert_exact: Callable[..., None]
) -> None:
    """Only faults that do not affect other tests on the cluster."""
    run = Scenario(cluster, tmp_path, nodes=lease(2))
    names = ["killed inside a save", "newest checkpoint damaged", "disk full or I/O error"]
    assert attack(Chaos(cluster, run, random.Random(0)), names, epochs=4) == 0, run.story
    assert_exact(run)


@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_run_survives_every_kind_of_fault_once(new_root: Path, strategy: str) -> None:
    assert disturb(new_root, faults=len(FAULTS), seed=0, strategy=strategy)


@pytest.mark.chaos
def test_run_with_snapshots_in_memory_survives_every_kind_of_fault_once(new_root: Path) -> None:
    assert disturb(new_root, faults=len(faults_of(memory=True)), seed=0, memory=True)
