"""Which rank a process is, for every launcher and every way to get it wrong."""

from __future__ import annotations

import pytest

from hpcaccel.errors import RankEnvironmentError
from hpcaccel.runtime.env import detect

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
STEP = {
    "SLURM_JOB_ID": "46",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu-a[07-08],gpu-b1",
}
BATCH_SHELL = {
    "SLURM_JOB_ID": "46",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def test_alone() -> None:
    found = detect({})
    assert (found.rank, found.world_size, found.local_rank, found.source) == (0, 1, 0, "single")


def test_torchrun() -> None:
    found = detect(TORCHRUN)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert (found.master_addr, found.master_port, found.source) == ("n1", 29500, "torchrun")


def test_torchrun_counts_before_slurm() -> None:
    assert detect({**STEP, **TORCHRUN}).rank == 3


def test_step_of_unequal_nodes() -> None:
    found = detect(STEP)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (9, 11, 1, 3)
    assert (found.master_addr, found.source) == ("gpu-a07", "slurm")


def test_all_tasks_of_a_step_agree_on_the_port_and_neighbours_do_not() -> None:
    port = detect(STEP).master_port
    assert detect({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).master_port == port
    assert 20_000 <= port < 40_000
    others = [{**STEP, "SLURM_JOB_ID": "10046"}, {**STEP, "SLURM_STEP_ID": "1"}, {**STEP, "SLURM_RESTART_COUNT": "1"}]
    assert port not in {detect(other).master_port for other in others}


def test_a_port_that_was_given_counts() -> None:
    assert detect({**STEP, "MASTER_PORT": "12345"}).master_port == 12345


def test_a_batch_shell_is_no_step() -> None:
    assert detect(BATCH_SHELL).world_size == 1


def test_several_tasks_that_each_believe_to_be_alone_are_refused() -> None:
    with pytest.raises(RankEnvironmentError, match=r"SLURM_NTASKS=11.*every task would train alone"):
        detect({**STEP, "RANK": "0", "WORLD_SIZE": "1"})


def test_a_supervisor_may_start_one_rank_inside_a_larger_step() -> None:
    assert detect({**STEP, "RANK": "0", "WORLD_SIZE": "1", "HPCACCEL_PROTOCOL": "1"}).world_size == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "RANK=4 must be less than WORLD_SIZE=4"),
        ({"RANK": "x"}, "RANK='x' must be a whole number"),
        ({"RANK": "-1"}, "RANK='-1' must be a whole number of at least 0"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be a whole number of at least 1"),
        ({"RANK": ""}, "RANK is not set"),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE=4 but MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "WORLD_SIZE=4 but MASTER_PORT is not set"),
        ({"LOCAL_RANK": ""}, "WORLD_SIZE=4 but LOCAL_RANK is not set"),
    ],
)
def test_incomplete_or_wrong_variables(change: dict[str, str], message: str) -> None:
    with pytest.raises(RankEnvironmentError, match=message):
        detect({**TORCHRUN, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_LOCALID": ""}, "SLURM_LOCALID is not set"),
        ({"SLURM_PROCID": "11"}, "SLURM_PROCID=11 must be less than SLURM_NTASKS=11"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3, but the step's layout .* has 3 nodes"),
    ],
)
def test_a_wrong_step(change: dict[str, str], message: str) -> None:
    with pytest.raises(RankEnvironmentError, match=message):
        detect({**STEP, **change})
