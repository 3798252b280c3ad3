"""One torchrun per node instead of a task per rank, on a real Slurm: signals, ends and logs are the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.node.allocation import SHORT_STEP

from .dev_cluster import Cluster
from .scenario import Scenario

Lease = Callable[[int], list[str]]
PAUSE = ("--pause", "0.25")


@pytest.fixture
def scenario(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(2))


@pytest.mark.chaos
@pytest.mark.parametrize("partition", ["gpu", "gpu0"])
def test_preempted_run_with_torchrun_loses_no_step(
    scenario: Scenario, assert_exact: Callable[..., None], partition: str
) -> None:
    scenario.train(*PAUSE, launcher="torchrun", slurm={"partition": partition})
    scenario.wait_for_step(8)
    scenario.preempt()
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("preempted", "requeue"), ("completed", "end")], scenario.story
    assert scenario.status()["steps_lost"] == 0
    assert [path.name for path in sorted(scenario.dir.attempt(1).glob("[0-9].log"))] == [f"{n}.log" for n in range(4)]
    assert_exact(scenario)


def test_short_step_leaves_the_jobs_memory_to_the_ranks(cluster: Cluster, lease: Lease, tmp_path: Path) -> None:
    """The first step still runs on one of two nodes, which is what Slurm sees for a moment after a step's end."""
    script, out = tmp_path / "job", tmp_path / "out"
    script.write_text(
        "#!/bin/bash\n"
        f"srun {SHORT_STEP} --ntasks=2 --ntasks-per-node=1 bash -c 'sleep $((5 * SLURM_PROCID))' & sleep 2\n"
        "srun --immediate=60 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=2 echo the ranks\n"
        "wait\n"
    )
    options = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--mem=4G"]
    job = cluster.sbatch(*options, f"--nodelist={','.join(lease(2))}", f"--output={out}", str(script))
    cluster.wait_for(job, ["COMPLETED"])
    assert out.read_text().splitlines() == ["the ranks"] * 2


@pytest.mark.chaos
def test_run_with_a_killed_rank_of_torchrun_restarts(scenario: Scenario, assert_exact: Callable[..., None]) -> None:
    scenario.train(*PAUSE, launcher="torchrun", checkpoint={"every_steps": 5})
    scenario.wait_for_checkpoint()
    os.kill(int(scenario.wait_for_word("ready", rank=3).split()[1]), signal.SIGKILL)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("failed", "restart"), ("completed", "end")], scenario.story
    # srun ends with the highest code of its tasks: that of the rank, or of the SIGTERM for the others. torchrun has 1.
    assert scenario.lines("end")[0]["exit_code"] in (137, 143)
    assert_exact(scenario)


@pytest.mark.chaos
def test_stopped_run_with_torchrun_is_resumed(scenario: Scenario, assert_exact: Callable[..., None]) -> None:
    scenario.train(*PAUSE, launcher="torchrun")
    scenario.wait_for_step(8)
    scenario.cli("stop", scenario.dir.run_id)
    assert scenario.wait_until_over() == 85, scenario.story
    scenario.cli("resume", scenario.dir.run_id)
    assert scenario.wait_until_over() == 0, scenario.story
    assert_exact(scenario)
