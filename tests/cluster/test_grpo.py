"""jobs/grpo on a real Slurm: the trainer's node is preempted while the server, on another node, generates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integrations.test_grpo import check, on_cpus, release, wait_until_held

from .dev_cluster import Cluster
from .scenario import Scenario

pytest.importorskip("trl")
pytestmark = [pytest.mark.torch, pytest.mark.chaos]


def test_preemption_during_a_generation_loses_no_step_and_the_new_server_gets_the_weights(
    cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path
) -> None:
    (tmp_path / "scenario").mkdir()
    trainer, server = lease(2)
    scenario, released = Scenario(cluster, tmp_path / "scenario", nodes=[trainer]), tmp_path / "released"
    spec = on_cpus(tmp_path, released)
    spec["components"]["vllm"]["slurm"] |= {"nodelist": server, "mem": "300M", "cpus_per_task": 1}
    scenario.submit({**spec, "slurm": {"nodes": 1}})
    wait_until_held(scenario)
    scenario.preempt()
    scenario._wait(lambda: "CANCELLED AT" in scenario.dir.slurm_log.read_text(), "SIGTERM to the ranks")
    release(scenario, released)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("preempted", "requeue"), ("completed", "end")], scenario.story
    check(scenario)
