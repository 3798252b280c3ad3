"""jobs/inference on a real Slurm: two nodes are preempted in the middle of the prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integrations.test_inference import check_job, on_cpus, wait_for_answers

from .dev_cluster import Cluster
from .scenario import Scenario

pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.chaos]


@pytest.mark.parametrize("partition", ["gpu", "gpu0"])
def test_preempted_job_answers_every_prompt_once(
    cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path, partition: str
) -> None:
    scenario = Scenario(cluster, tmp_path, nodes=lease(2))
    scenario.submit({**on_cpus(tmp_path), "slurm": {"partition": partition, "gpus_per_node": 1}})
    wait_for_answers(scenario, 5)
    scenario.preempt()
    assert scenario.wait_until_over() == 0, scenario.story
    check_job(scenario, "preempted")
