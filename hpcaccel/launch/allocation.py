"""Inside a Slurm allocation: the srun step that runs the ranks on all its nodes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcaccel.core.free_port import free_port
from hpcaccel.errors import UserError
from hpcaccel.launch.group_size import GroupSize, machines, ranks_per_machine
from hpcaccel.slurm import Slurm, hostlist
from hpcaccel.slurm.site_parsing import tres

__all__ = ["SlurmAllocation", "gpus_on_each_node", "place", "started_tasks"]

FIRST_SPECIAL_STEP = 0xFFFFFFFA
"""First of Slurm's special step numbers: shells of sbatch and salloc, which are no tasks of a step."""
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
_OWN_MACHINES = ("num_machines", "nnodes", "rdzv_endpoint", "standalone", "machine_rank")
"""Flags with which each task of a step is a launcher of its own, as in `srun torchrun --nnodes ...`."""
_SHAPE = (
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_TRES_BIND", "SLURM_GPU_BIND",
    "SLURM_NTASKS_PER_GPU", "SLURM_DISTRIBUTION", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
)  # fmt: skip
"""Variables of the surrounding job that would change the step's shape or its ranks."""
_RANK = (
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID GROUP_RANK=$SLURM_NODEID ROLE_RANK=$SLURM_PROCID "
    'TORCHELASTIC_RUN_ID="$SLURM_JOB_ID.$SLURM_STEP_ID"; exec "$@"'
)
"""What each task runs: it sets torchrun's variables from Slurm's, and becomes the program."""


def place(environ: Mapping[str, str], given: Mapping[str, Any]) -> Literal["rank", "allocation", "machine"]:
    """Where this launcher runs.

    Args:
        given: flags of the command line.

    Returns:
        ``rank``: in a Slurm task, an mpirun rank or a rank of an hpcaccel run; this process becomes the program.
        ``allocation``: in a job's shell; srun starts the ranks. ``machine``: anywhere else.
    """
    if "RANK" in environ and "HPCACCEL_RUN_DIR" in environ:
        return "rank"
    if started_tasks(environ) is not None:
        return "machine" if any(name in given for name in _OWN_MACHINES) else "rank"
    tasks = _tasks_of_step(environ)
    if "SLURM_JOB_ID" not in environ or given.get("standalone"):
        return "machine"
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1"
    if nodes == "1" and (tasks == 1 or shutil.which("srun") is None):
        return "machine"  # a shell that srun started, or a container without Slurm: its own GPUs are those of the job
    return "allocation"


def started_tasks(environ: Mapping[str, str]) -> str | None:
    """The number of processes that srun or mpirun started together with this one; None if there are no others."""
    if (tasks := _tasks_of_step(environ)) > 1:
        return str(tasks)
    return next((size for name in _MPI_SIZES if (size := environ.get(name, "")) not in ("", "1")), None)


def _tasks_of_step(environ: Mapping[str, str]) -> int:
    """The number of tasks of the step that this process belongs to; 0 if srun did not start it."""
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= FIRST_SPECIAL_STEP:
        return 0
    return int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or 1)


@dataclass(frozen=True)
class SlurmAllocation:
    """The job that this process belongs to."""

    job_id: str
    nodes: list[str]
    cpus: int
    """CPUs on the node with the fewest."""
    gpus: int
    """GPUs on each node."""

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> SlurmAllocation:
        """The allocation that the environment describes.

        Raises:
            UserError: a variable cannot be parsed, or the nodes have different numbers of GPUs.
        """
        job_id = environ["SLURM_JOB_ID"]
        listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
        try:
            nodes = hostlist.expand(listed)
            cpus = min(hostlist.tasks_per_node(environ.get("SLURM_JOB_CPUS_PER_NODE") or "1"))
        except ValueError as error:
            raise UserError(f"the variables of job {job_id} cannot be parsed: {error}") from None
        if not nodes:
            raise UserError(f"SLURM_JOB_ID={job_id}, but SLURM_JOB_NODELIST is not set. Unset SLURM_JOB_ID, or use "
                            "--standalone, to start the ranks on this machine")  # fmt: skip
        return cls(job_id, nodes, cpus, gpus_on_each_node(environ, job_id, len(nodes)))

    def size(self, options: Mapping[str, Any]) -> GroupSize:
        """The nodes to use, and the ranks on each.

        Raises:
            UserError: the options contradict the allocation.
        """
        _, high = machines({"num_machines": len(self.nodes), **options} if "nnodes" not in options else options)
        if high > len(self.nodes):
            has = f"{len(self.nodes)}: {' '.join(self.nodes)}"
            raise UserError(f"{high} nodes requested, but job {self.job_id} has {has}")
        per = ranks_per_machine(options, high, high)
        if per in ("gpu", "auto", "xpu"):
            per = str(self.gpus or 1)
        if per == "cpu":
            per = str(self.cpus)
        if options.get("multi_gpu") and not options.get("cpu") and self.gpus == 0:
            raise UserError(f"--multi-gpu, but job {self.job_id} has no GPUs: request them with --gpus-per-node")
        return GroupSize(str(high), per or ("1" if options.get("cpu") else str(self.gpus or 1)))

    def variables(self, options: Mapping[str, Any], size: GroupSize, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of srun and the ranks: torchrun's variables, without those of the job that would change the
        step's shape (numbers of tasks, CPUs and GPUs, binding)."""
        ranks = int(size.per_machine)
        port = options.get("main_process_port") or environ.get("MASTER_PORT", "").strip()
        return {
            **{name: value for name, value in environ.items() if name not in _SHAPE},
            "WORLD_SIZE": str(int(size.machines) * ranks),
            "LOCAL_WORLD_SIZE": size.per_machine,
            "GROUP_WORLD_SIZE": size.machines,
            "MASTER_ADDR": options.get("main_process_ip") or self.nodes[0],
            "MASTER_PORT": str(port or free_port()),
        }

    def step(
        self, command: list[str], size: GroupSize, environ: Mapping[str, str], *, name: str, one_each: bool = False
    ) -> list[str]:
        """The srun command for the ranks.

        Args:
            name: the step's name, by which the launcher finds it.
            one_each: one task on each node, which starts the node's ranks itself.
        """
        ranks = int(size.per_machine)
        tasks = 1 if one_each else ranks
        cpus = self.cpus_per_rank(environ, ranks) * (ranks // tasks)
        return [
            *("srun", "--unbuffered", "--kill-on-bad-exit=1", "--export=ALL", f"--job-name={name}"),
            *(f"--nodes={size.machines}", f"--ntasks={int(size.machines) * tasks}", f"--ntasks-per-node={tasks}"),
            *((f"--cpus-per-task={cpus}",) if ranks <= self.cpus else ("--overcommit",)),
            *(("--overlap",) if _tasks_of_step(environ) else ()),
            f"--chdir={os.getcwd()}",
            *([] if one_each else ["bash", "-c", _RANK, "hpcaccel-launch"]),
            *command,
        ]

    def cpus_per_rank(self, environ: Mapping[str, str], ranks: int) -> int:
        """The CPUs of each of a node's ``ranks``, at least 1."""
        asked = environ.get("SLURM_CPUS_PER_TASK", "")
        if asked.isdecimal() and int(asked) * ranks <= self.cpus:
            return int(asked)
        return max(1, self.cpus // ranks)


def gpus_on_each_node(environ: Mapping[str, str], job_id: str, nodes: int) -> int:
    """The number of GPUs that a job has on each of its nodes.

    The shell of salloc runs on a login node, where Slurm sets no SLURM_GPUS_ON_NODE. There, the job's request or else
    its record has the number.

    Args:
        environ: the environment of the job's shell.
        nodes: the job's number of nodes.

    Raises:
        UserError: the nodes have different numbers of GPUs.
    """
    if environ.get("SLURM_GPUS_ON_NODE", "").isdecimal():
        return _even(int(environ["SLURM_GPUS_ON_NODE"]), environ, nodes)
    if "SLURMD_NODENAME" in environ:  # Slurm sets the variable above in a job with GPUs
        return 0
    if given := environ.get("SLURM_GPUS_PER_NODE"):
        return sum(int(number) for number in re.findall(r"(?:^|:)(\d+)(?:,|$)", given))
    total = tres(Slurm().job_record(job_id).get("AllocTRES")).get("gres/gpu", "0")
    return _even(int(total) // nodes, {"SLURM_GPUS": total}, nodes)


def _even(per_node: int, environ: Mapping[str, str], nodes: int) -> int:
    total = environ.get("SLURM_GPUS", "")
    if total.isdecimal() and int(total) != per_node * nodes:
        raise UserError(
            f"the {total} GPUs of this job are spread unevenly over its {nodes} nodes: request --gpus-per-node instead "
            "of --gpus, or start the ranks with srun"
        )
    return per_node
