"""Samples of a run's nodes on a real Slurm: one sampler a node, whose death changes nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.core.samples import read_samples

from .dev_cluster import Cluster, wait_until
from .scenario import Scenario

OFTEN = {"env": {"HPCACCEL_SAMPLE_SECONDS": "0.5"}}


def samplers(scenario: Scenario) -> list[int]:
    """Processes of samplers of this run, on all nodes: the nodes of the development cluster share a machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"sample" in words and b"srun" not in words[0] and os.fsencode(scenario.dir.path) in words:
            found.append(int(path.parent.name))
    return found


@pytest.mark.chaos
def test_each_node_is_sampled_and_a_killed_sampler_changes_nothing(
    cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path
) -> None:
    scenario = Scenario(cluster, tmp_path, nodes=lease(2))
    scenario.train("--pause", "0.25", environment={"python": sys.executable, **OFTEN})

    def lines() -> list[int]:
        return [len(one) for one in read_samples(scenario.dir, 1).values()]

    wait_until(lambda: len(lines()) == 2 and min(lines()) >= 4, "four samples of each node")
    found = read_samples(scenario.dir, 1)
    assert sorted(found) == sorted(scenario.nodes)
    for one in found.values():
        assert (one[-1].source, one[-1].memory_limit) == ("processes", 4 << 30)
        assert (one[-1].cpus or 0) >= 2  # two ranks, with a CPU each
    killed = samplers(scenario)
    assert len(killed) == 2
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("completed", "end")], scenario.story
    used = scenario.status()["usage"]
    assert sorted(node["node"] for node in used["nodes"]) == sorted(scenario.nodes)
    assert not (scenario.dir.attempt(1) / "stop.json").exists()


@pytest.mark.chaos
def test_samplers_end_with_a_preempted_attempt_and_start_with_the_next(
    cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path
) -> None:
    scenario = Scenario(cluster, tmp_path, nodes=lease(2))
    scenario.train("--pause", "0.25", environment={"python": sys.executable, **OFTEN})
    wait_until(lambda: len(read_samples(scenario.dir, 1)) == 2, "samples of both nodes")
    scenario.preempt()
    wait_until(lambda: len(read_samples(scenario.dir, 2)) == 2, "samples of both nodes in the second attempt")
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("preempted", "requeue"), ("completed", "end")], scenario.story
    end = time.monotonic() + 60
    while samplers(scenario) and time.monotonic() < end:
        time.sleep(0.2)
    assert samplers(scenario) == []
