"""What is started inside allocations and steps of Slurm, without starting it."""

from __future__ import annotations

import pytest

from hpcaccel.launch.launch_plan import LaunchPlan

from . import planning
from .planning import AGENT, ALONE, GPUS, PYTHON, config, plan, refusal, torchrun

pytestmark = pytest.mark.usefixtures("script_and_srun")

JOB = {**planning.JOB, "SLURM_NTASKS": "2", "SLURM_GPUS_PER_TASK": "4"}


def step(found: LaunchPlan) -> list[str]:
    """srun's options about the shape of the step."""
    assert found.command[0] == "srun"
    assert found.job_id == "7"
    assert f"--job-name={found.step}" in found.command
    return [word for word in found.command if word.startswith(("--nodes", "--ntasks", "--cpus", "--over"))]


def test_rank_on_every_gpu_of_every_node() -> None:
    found = plan("t.py --x", JOB, config(num_processes=1, distributed_type="NO", mixed_precision="bf16"))
    assert step(found) == ["--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=2"]
    assert found.command[-4:] == ["hpcaccel-launch", PYTHON, "t.py", "--x"]
    env = found.environ
    assert [env[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")] == ["8", "4", "n1"]
    assert env["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert not {"SLURM_NTASKS", "SLURM_GPUS_PER_TASK", "RANK"} & env.keys()


def test_sizes_inside_an_allocation() -> None:
    cpus = {name: value for name, value in JOB.items() if name != "SLURM_GPUS_ON_NODE"}
    assert step(plan("t.py", cpus))[:3] == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]
    assert step(plan("--num-processes 6 t.py", cpus))[1:] == ["--ntasks=6", "--ntasks-per-node=3", "--cpus-per-task=2"]
    assert step(plan("--nproc-per-node 16 t.py", cpus))[2:] == ["--ntasks-per-node=16", "--overcommit"]
    assert step(plan("--nnodes 1 --nproc-per-node gpu t.py", JOB))[:2] == ["--nodes=1", "--ntasks=4"]
    assert step(plan("t.py", {**JOB, "SLURM_CPUS_PER_TASK": "1"}))[3] == "--cpus-per-task=1"
    # The shell of salloc runs on a login node, where Slurm sets no SLURM_GPUS_ON_NODE.
    shell = {name: value for name, value in cpus.items() if name != "SLURMD_NODENAME"}
    assert step(plan("t.py", {**shell, "SLURM_GPUS_PER_NODE": "a100:2"}))[1] == "--ntasks=4"


def test_torchruns_agent_on_each_node() -> None:
    found = plan("--max-restarts 2 --master-port 4 t.py", JOB)
    assert step(found) == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8"]
    agent = found.command[found.command.index(PYTHON) :]
    assert agent[:3] == AGENT
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:4"} <= set(agent)
    assert found.environ["OMP_NUM_THREADS"] == "2"
    line = "--max-restarts 2 --nproc-per-node gpu t.py"
    assert plan(line, JOB).environ["OMP_NUM_THREADS"] == "2"
    assert plan(line, {**JOB, "OMP_NUM_THREADS": "5"}).environ["OMP_NUM_THREADS"] == "5"


def test_allocation_that_does_not_fit_is_refused() -> None:
    assert "3 nodes requested, but job 7 has 2: n1 n2" in refusal("--nnodes 3 t.py", JOB)
    assert "spread unevenly" in refusal("t.py", {**JOB, "SLURM_GPUS": "6"})
    without = {name: value for name, value in JOB.items() if name != "SLURM_GPUS_ON_NODE"}
    assert "job 7 has no GPUs" in refusal("--multi-gpu t.py", without)
    assert "SLURM_JOB_NODELIST is not set" in refusal("t.py", {**JOB, "SLURM_JOB_NODELIST": ""})
    assert plan("--machine-rank 0 t.py", JOB).notes == ["--machine-rank inside an allocation: Slurm decides"]


def test_task_of_a_step_and_rank_of_mpirun_become_the_program() -> None:
    task = {**JOB, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert plan("t.py", task).command == [PYTHON, "t.py"]
    assert plan("--num-processes 2 --mixed-precision bf16 t.py", task).environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "one of 2 processes that srun or mpirun started" in refusal("--num-processes 8 t.py", task)
    mpi = {**ALONE, "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "0", "SLURM_NTASKS": "1"}
    assert "one of 4 processes that srun or mpirun started" in refusal("--num-processes 8 t.py", mpi)
    assert plan("t.py", {**ALONE, "PMI_SIZE": "16", "PMI_RANK": "3"}).command == [PYTHON, "t.py"]
    assert plan("t.py", {**ALONE, "RANK": "0", "HPCACCEL_RUN_DIR": "/r", "WORLD_SIZE": "2"}).command == [PYTHON, "t.py"]


def test_launcher_on_each_node_of_a_step() -> None:
    task = {**JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1", **GPUS}
    line = "--num-processes 8 --num-machines 2 --main-process-ip n1 --main-process-port 1"
    expected = ["--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d", "--rdzv-endpoint=n1:1"]
    assert torchrun(plan(f"{line} --rdzv-backend c10d t.py", task)) == expected
    assert "--node-rank=1" in torchrun(plan(f"{line} t.py", task))


def test_shell_that_srun_started_on_one_node_uses_its_own_gpus() -> None:
    shell = {**JOB, "SLURM_JOB_NUM_NODES": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", **GPUS}
    assert torchrun(plan("t.py", shell)) == ["--nnodes=1", "--nproc-per-node=4", "--standalone"]
    assert plan("t.py", {**shell, "SLURM_STEP_ID": "4294967290"}).command[0] == "srun"
    assert torchrun(plan("--standalone --nproc-per-node 2 t.py", JOB))[1] == "--nproc-per-node=2"
