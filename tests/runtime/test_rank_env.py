"""Detection of rank, world size and device from each launcher's environment, and of wrong environments."""

from __future__ import annotations

from typing import Any

import pytest

from hpcaccel.errors import RankEnvironmentError
from hpcaccel.runtime.distributed.device_mesh import choose_device
from hpcaccel.runtime.distributed.rank_env import detect

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


def test_process_without_a_launcher_is_rank_0_of_1() -> None:
    found = detect({})
    assert (found.rank, found.world_size, found.local_rank, found.source) == (0, 1, 0, "single")


def test_torchrun_variables_are_read() -> None:
    found = detect(TORCHRUN)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert (found.master_addr, found.master_port, found.source) == ("n1", 29500, "torchrun")


def test_torchrun_takes_precedence_over_slurm() -> None:
    assert detect({**STEP, **TORCHRUN}).rank == 3


def test_slurm_step_on_unequal_nodes_is_read() -> None:
    found = detect(STEP)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (9, 11, 1, 3)
    assert (found.master_addr, found.source) == ("gpu-a07", "slurm")


def test_tasks_of_a_step_share_a_port_that_other_steps_do_not_use() -> None:
    port = detect(STEP).master_port
    assert detect({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).master_port == port
    assert 20_000 <= port < 40_000
    others = [{**STEP, "SLURM_JOB_ID": "10046"}, {**STEP, "SLURM_STEP_ID": "1"}, {**STEP, "SLURM_RESTART_COUNT": "1"}]
    assert port not in {detect(other).master_port for other in others}


def test_given_master_port_is_used() -> None:
    assert detect({**STEP, "MASTER_PORT": "12345"}).master_port == 12345


def test_batch_shell_is_not_a_step() -> None:
    assert detect(BATCH_SHELL).world_size == 1


ALLOCATION = {**BATCH_SHELL, "SLURM_JOB_NODELIST": "gpu-a[07-08]", "SLURM_TASKS_PER_NODE": "2(x2)"}
"""Variables of the shells of sbatch and salloc. Steps have them too, next to their own."""
TASK = {
    **ALLOCATION,
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu-a[07-08]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
ELASTIC = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "n1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
MPIRUNS_STEP = {**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
"""Open MPI starts one helper per node with srun, and its ranks as children of the helpers."""

ALONE = (0, 1, 0, 1, "single")


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        pytest.param({}, ALONE, id="plain python"),
        pytest.param(TORCHRUN, (3, 4, 1, 2, "torchrun"), id="torchrun"),
        pytest.param({**TASK, **ELASTIC}, (3, 4, 1, 2, "torchrun"), id="torchrun in each task of srun"),
        pytest.param(
            {**MPIRUNS_STEP, **ELASTIC, "RANK": "0"}, (0, 4, 1, 2, "torchrun"), id="torchrun numbers ranks anew"
        ),
        pytest.param(TASK, (3, 4, 1, 2, "slurm"), id="srun, one task per GPU"),
        pytest.param({**TASK, "PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, 1, 2, "slurm"), id="srun --mpi=pmi2"),
        pytest.param({**TASK, "PMIX_RANK": "3"}, (3, 4, 1, 2, "slurm"), id="srun --mpi=pmix"),
        pytest.param({**TASK, "WORLD_SIZE": "4"}, (3, 4, 1, 2, "slurm"), id="WORLD_SIZE exported in the batch script"),
        pytest.param({**TASK, "SLURM_JOB_NAME": "bash"}, (3, 4, 1, 2, "slurm"), id="a job called bash"),
        pytest.param({**TASK, "SLURM_JOB_NAME": "interactive"}, (3, 4, 1, 2, "slurm"), id="a job called interactive"),
        pytest.param(
            {**TASK, "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "6"}, (3, 4, 1, 2, "slurm"), id="a job array"
        ),
        pytest.param(STEP, (9, 11, 1, 3, "slurm"), id="unequal nodes"),
        pytest.param(
            {**TASK, "SLURM_STEP_NUM_TASKS": "", "SLURM_STEP_TASKS_PER_NODE": ""},
            (3, 4, 1, 2, "slurm"),
            id="a Slurm that says less of its steps",
        ),
        pytest.param(ALLOCATION, ALONE, id="batch shell, or salloc's"),
        pytest.param({**ALLOCATION, "SLURM_STEP_ID": "4294967291"}, ALONE, id="batch shell that is a step by name"),
        pytest.param({**ALLOCATION, "SLURM_STEP_ID": "4294967290"}, ALONE, id="salloc with an interactive step"),
        pytest.param(
            {**ALLOCATION, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
            (0, 1, 0, 1, "slurm"),
            id="a step of one task in a job of four",
        ),
        pytest.param({**TASK, "HPCACCEL_ALONE": "1"}, ALONE, id="each by itself, on purpose"),
        pytest.param({"WORLD_SIZE": "1"}, ALONE, id="WORLD_SIZE=1"),
        pytest.param(OMPI, (3, 4, 1, 2, "mpi"), id="Open MPI"),
        pytest.param({**MPIRUNS_STEP, **OMPI}, (3, 4, 1, 2, "mpi"), id="Open MPI over several nodes of Slurm"),
        pytest.param({**ALLOCATION, **OMPI}, (3, 4, 1, 2, "mpi"), id="Open MPI on the batch node"),
        pytest.param(HYDRA, (1, 2, 1, 2, "mpi"), id="MPICH, Intel MPI"),
        pytest.param(MVAPICH, (1, 2, 1, 2, "mpi"), id="MVAPICH"),
        pytest.param({"PMIX_RANK": "0"}, ALONE, id="PMIx without a size, rank 0"),
    ],
)
def test_launcher_and_rank_are_detected(environ: dict[str, str], place: tuple[Any, ...]) -> None:
    found = detect(environ)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size, found.source) == place


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu-a[07-08],gpu-b1", "gpu-a07"),
        ("rack-2-n[001-003,7]", "rack-2-n001"),
        ("node-with-dashes", "node-with-dashes"),
        ("r[1-2]n[01-02]", "r1n01"),
        ("n7.cluster.example.org,n8", "n7.cluster.example.org"),
    ],
)
def test_master_address_is_the_first_node_or_the_given_one(nodes: str, first: str) -> None:
    assert detect({**TASK, "SLURM_STEP_NODELIST": nodes}).master_addr == first
    assert detect({**TASK, "SLURM_STEP_NODELIST": nodes, "MASTER_ADDR": "n1-ib"}).master_addr == "n1-ib"


def test_mpi_ranks_share_a_master_address_and_port() -> None:
    assert detect(HYDRA).master_addr == "127.0.0.1"
    assert (detect(HYDRA).master_port, detect(HYDRA).ports) == (29_500, ())
    assert detect({**HYDRA, "MASTER_PORT": "1234"}).master_port == 1234
    across = {name: value for name, value in OMPI.items() if name != "MASTER_ADDR"}
    assert detect({**ALLOCATION, **across}).master_addr == "gpu-a07"
    jobs = [{**OMPI, "PMIX_NAMESPACE": job} for job in ("prterun-n1-4711@1", "prterun-n1-4712@1")]
    assert len({detect(job).key for job in jobs}) == len({detect(job).ports for job in jobs}) == 2


def test_port_candidates_are_sixteen_distinct_ports() -> None:
    ports = detect(TASK).ports
    assert len(set(ports)) == len(ports) == 16
    assert ports[0] == detect(TASK).master_port
    assert detect({**TASK, "MASTER_PORT": "1234"}).ports == ()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        pytest.param(
            {**TASK, "RANK": "0", "WORLD_SIZE": "4"},
            r"RANK=0, but this is task 3 of 4.*set to the same value for all tasks",
            id="the same RANK for all tasks",
        ),
        pytest.param({**TASK, "WORLD_SIZE": "8"}, "WORLD_SIZE=8, but this Slurm step has 4 tasks", id="other size"),
        pytest.param({"WORLD_SIZE": "4"}, "WORLD_SIZE=4, but RANK is not set", id="only the size"),
        pytest.param(
            {"PMIX_RANK": "2"},
            "PMIX_RANK=2, but none of .* is set, so the number of ranks is unknown",
            id="PMIx, no size",
        ),
        pytest.param({**HYDRA, "PMI_RANK": "2"}, "PMI_RANK=2 must be less than PMI_SIZE=2", id="MPI, rank too high"),
        pytest.param({"PMI_RANK": "1", "PMI_SIZE": "2"}, "does not set a local rank", id="no local rank"),
        pytest.param({**OMPI, "MASTER_ADDR": ""}, "MASTER_ADDR is not set. Set it to the host", id="MPI, no address"),
        pytest.param({**TASK, "SLURM_STEP_NODELIST": "n[1-"}, "brackets do not match", id="node list torn"),
        pytest.param({**TASK, "SLURM_STEP_TASKS_PER_NODE": "4(y2)"}, "cannot be parsed.*4\\(y2\\)", id="layout torn"),
        pytest.param({**MPIRUNS_STEP, "RANK": "0", "WORLD_SIZE": "1"}, "every task would train alone", id="lonely"),
    ],
)  # fmt: skip
def test_contradictory_rank_variables_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(RankEnvironmentError, match=message):
        detect(environ)


# -- GPUs --------------------------------------------------------------------------------------------------------------

ONE_TASK = {**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
ONE_TASK["SLURM_LOCALID"] = "0"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that torch sees ``count`` GPUs."""

    def pretend(count: int, environ: dict[str, str]) -> Any:
        for name in ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_TASK", "HPCACCEL_GPUS_PER_TASK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("torch.cuda.is_available", lambda: count > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)
        monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
        return lambda: choose_device(detect(environ), cpu=False).index

    return pretend


@pytest.mark.parametrize(
    ("count", "environ", "index"),
    [
        pytest.param(4, TORCHRUN, 1, id="torchrun: the local rank's"),
        pytest.param(2, TASK, 1, id="srun, all GPUs visible: the local rank's"),
        pytest.param(1, {**TASK, "CUDA_VISIBLE_DEVICES": "3"}, 0, id="--gpus-per-task=1: the only one"),
        pytest.param(1, {**ONE_TASK, "CUDA_VISIBLE_DEVICES": "0"}, 0, id="one task per node, one GPU"),
        pytest.param(4, {}, 0, id="plain python: the first"),
        pytest.param(4, ALLOCATION, 0, id="plain python in an allocation: the first"),
        pytest.param(4, {**ONE_TASK, "HPCACCEL_GPUS_PER_TASK": "all"}, 0, id="one task for all GPUs, on purpose"),
        pytest.param(4, {**TASK, "HPCACCEL_GPUS_PER_TASK": "all"}, 2, id="two tasks for two GPUs each, on purpose"),
        pytest.param(
            2, {**TASK, "SLURM_GPUS_PER_TASK": "2", "HPCACCEL_GPUS_PER_TASK": "all"}, 0, id="--gpus-per-task=2, meant"
        ),
        pytest.param(4, {**ONE_TASK, "SLURM_PTY_PORT": "4711"}, 0, id="a shell of srun --pty"),
    ],
)
def test_rank_gets_its_gpu(gpus: Any, count: int, environ: dict[str, str], index: int) -> None:
    assert gpus(count, environ)() == index


@pytest.mark.parametrize(
    ("count", "environ", "message"),
    [
        pytest.param(4, ONE_TASK, r"4 GPUs.*ntasks_per_node: 4.*launcher: torchrun.*--nproc-per-node 4", id="torch"),
        pytest.param(0, {**ONE_TASK, "CUDA_VISIBLE_DEVICES": "0,1"}, "sees 2 GPUs", id="visible devices"),
        pytest.param(0, {**ONE_TASK, "SLURM_GPUS_ON_NODE": "8"}, "sees 8 GPUs", id="the node's"),
        pytest.param(
            2, {**TASK, "SLURM_GPUS_PER_TASK": "a100:2"}, "sees 2 GPUs.*ntasks_per_node: 4,", id="--gpus-per-task=2"
        ),
        pytest.param(1, TASK, "local rank 1 has no GPU of its own: the 2 ranks on this node see only 1", id="too few"),
        pytest.param(1, {**TORCHRUN, "LOCAL_RANK": "3"}, "local rank 3 has no GPU", id="torchrun, too few"),
    ],
)  # fmt: skip
def test_gpu_count_that_does_not_fit_the_ranks_is_refused(
    gpus: Any, count: int, environ: dict[str, str], message: str
) -> None:
    with pytest.raises(RankEnvironmentError, match=message):
        gpus(count, environ)()


def test_gpu_count_is_not_checked_on_the_cpu(gpus: Any) -> None:
    gpus(4, ONE_TASK)
    assert choose_device(detect(ONE_TASK), cpu=True).type == "cpu"


# -- wrong environments -----------------------------------------------------------------------------------------------


def test_tasks_that_would_each_train_alone_are_refused() -> None:
    with pytest.raises(RankEnvironmentError, match=r"11 tasks.*every task would train alone"):
        detect({**STEP, "RANK": "0", "WORLD_SIZE": "1"})


def test_supervisor_may_start_one_rank_in_a_larger_step() -> None:
    assert detect({**STEP, "RANK": "0", "WORLD_SIZE": "1", "HPCACCEL_PROTOCOL": "1"}).world_size == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "RANK=4 must be less than WORLD_SIZE=4"),
        ({"RANK": "x"}, "RANK='x' must be an integer"),
        ({"RANK": "-1"}, "RANK='-1' must be an integer >= 0"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be an integer >= 1"),
        ({"RANK": ""}, "RANK is not set"),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE=4, but MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "WORLD_SIZE=4, but MASTER_PORT is not set"),
        ({"LOCAL_RANK": ""}, "WORLD_SIZE=4, but LOCAL_RANK is not set"),
    ],
)
def test_incomplete_or_invalid_torchrun_variables_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(RankEnvironmentError, match=message):
        detect({**TORCHRUN, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_LOCALID": ""}, "SLURM_LOCALID is not set"),
        ({"SLURM_PROCID": "11"}, "SLURM_PROCID=11 must be less than SLURM_NTASKS=11"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3 must be less than the number of nodes in the step's task layout "),
    ],
)
def test_invalid_slurm_step_variables_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(RankEnvironmentError, match=message):
        detect({**STEP, **change})
