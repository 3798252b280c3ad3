"""Rank, world size and rendezvous address of this process, from the environment.

Variables are used in this order: torchrun's (hpcaccel's own launcher sets them too), a Slurm step's (unless mpirun
started ranks inside the step), an MPI launcher's. Without any of them, the process trains alone. If each task of a step
would train alone, an error is raised, as they would overwrite each other's files. ``HPCACCEL_ALONE=1`` allows it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hpcaccel.errors import RankEnvironmentError
from hpcaccel.runtime.distributed.port_discovery import candidate_ports
from hpcaccel.slurm import hostlist

__all__ = ["RankEnvironment", "detect", "is_set"]

FIRST_SPECIAL_STEP = 0xFFFFFFFA
"""First of Slurm's special step numbers (interactive shells, the batch script …), whose steps have no ranks."""
DEFAULT_PORT = 29_500
"""torch's default port, used with an MPI launcher that sets no job id."""


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """Rank of this process and number of ranks, in total and on this node (``local_*``); the rendezvous address."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    source: Literal["torchrun", "slurm", "mpi", "script", "xla", "single"]
    largest_node: int = 1
    """The largest number of ranks on one node."""
    key: str = ""
    """Name of this group of ranks, made of the launcher's name and ids, such as Slurm's job and step ids."""
    ports: tuple[int, ...] = ()
    """Candidate ports for rank 0's port discovery; empty if the store is at ``master_port``."""

    @property
    def variables(self) -> dict[str, str]:
        """torchrun's environment variables, with the values of this object."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


ALONE = RankEnvironment(
    rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="127.0.0.1", master_port=0, source="single"
)


class _MpiRank(NamedTuple):
    """Values of an MPI launcher's variables."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


def detect(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """The rank environment of this process, from ``environ`` (default: ``os.environ``).

    Raises:
        RankEnvironmentError: the variables are incomplete or contradictory, or every task of a step would train alone.
    """
    env = os.environ if environ is None else environ
    if is_set("HPCACCEL_ALONE", env):
        return ALONE
    if "RANK" in env:
        return _from_torchrun(env)
    mpi = _read_mpi(env)
    if _in_step(env) and not _started_inside_step(env, mpi):
        return _from_slurm(env)
    if mpi is not None:
        return _from_mpi(env, mpi)
    if _number(env, "WORLD_SIZE", least=1, default=1) > 1:
        raise RankEnvironmentError(
            f"WORLD_SIZE={env['WORLD_SIZE']}, but RANK is not set, so the rank of this process is unknown. "
            "Start the ranks with hpcaccel submit, srun or torchrun, or unset WORLD_SIZE"
        )
    return ALONE


def is_set(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a variable is set to 1, true, yes, y or on."""
    env = os.environ if environ is None else environ
    return env.get(name, "").strip().lower() in ("1", "true", "yes", "y", "on")


# -- torchrun ----------------------------------------------------------------------------------------------------------


def _from_torchrun(env: Mapping[str, str]) -> RankEnvironment:
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE", least=1)
    if rank >= world:
        raise RankEnvironmentError(f"RANK={rank} must be less than WORLD_SIZE={world}")
    _require_group_of_tasks(env, rank, world)
    if world > 1:
        for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not env.get(name):
                raise RankEnvironmentError(
                    f"WORLD_SIZE={world}, but {name} is not set. Start the ranks with hpcaccel submit, srun or torchrun"
                )
    local_world = _number(env, "LOCAL_WORLD_SIZE", least=1, default=1)
    return RankEnvironment(
        rank=rank,
        world_size=world,
        local_rank=_number(env, "LOCAL_RANK", default=0),
        local_world_size=local_world,
        master_addr=env.get("MASTER_ADDR") or "127.0.0.1",
        master_port=_number(env, "MASTER_PORT", default=0),
        source="torchrun",
        largest_node=local_world,
        # torchrun's own store survives a restart of the ranks, so each restart needs another key.
        key=f"torchrun.{env.get('TORCHELASTIC_RUN_ID', '')}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def _require_group_of_tasks(env: Mapping[str, str], rank: int, world: int) -> None:
    tasks = _tasks(env)
    # hpcaccel's supervisor may start one rank inside a larger step.
    if not _in_step(env) or tasks == "1" or "HPCACCEL_PROTOCOL" in env:
        return
    if world == 1:
        raise RankEnvironmentError(
            f"this Slurm step has {tasks} tasks, but WORLD_SIZE=1: every task would train alone and "
            "overwrite the other tasks' files. Unset RANK and WORLD_SIZE, start one task with srun --ntasks=1, or set "
            "HPCACCEL_ALONE=1 if each task should train alone"
        )
    if rank == 0 and env.get("SLURM_PROCID", "0") != "0" and "TORCHELASTIC_RUN_ID" not in env:
        raise RankEnvironmentError(
            f"RANK=0, but this is task {env['SLURM_PROCID']} of {tasks} (SLURM_PROCID): RANK has probably been "
            "set to the same value for all tasks. Unset RANK and WORLD_SIZE: ranks in a Slurm step do not need them"
        )


# -- a Slurm step ------------------------------------------------------------------------------------------------------


def _in_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process. Shells started by sbatch and salloc have most of srun's variables, too."""
    step = env.get("SLURM_STEP_ID", "")
    return bool(step) and not (step.isdigit() and int(step) >= FIRST_SPECIAL_STEP)


def _tasks(env: Mapping[str, str]) -> str:
    # If a shell has inherited a step's variables, SLURM_NTASKS may be the job's number of tasks.
    return env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or "1"


def _from_slurm(env: Mapping[str, str]) -> RankEnvironment:
    name = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    rank, world = _number(env, "SLURM_PROCID"), _number(env, name, least=1)
    local_rank, node = _number(env, "SLURM_LOCALID"), _number(env, "SLURM_NODEID")
    if rank >= world:
        raise RankEnvironmentError(f"SLURM_PROCID={rank} must be less than {name}={world}")
    given = env.get("WORLD_SIZE")
    if given and given != str(world):
        raise RankEnvironmentError(
            f"WORLD_SIZE={given}, but this Slurm step has {world} task{'s' * (world > 1)}. Unset WORLD_SIZE, or start "
            f"the step with srun --ntasks={given}"
        )
    layout = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(world)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    try:
        per_node, first_node = hostlist.tasks_per_node(layout), hostlist.expand(nodes)[0]
    except ValueError as error:
        raise RankEnvironmentError(f"the variables of this Slurm step cannot be parsed: {error}") from None
    if node >= len(per_node):
        raise RankEnvironmentError(
            f"SLURM_NODEID={node} must be less than the number of nodes in the step's task layout {layout!r}"
        )
    step = [env.get(name) or "0" for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    port, ports = _ports(env, *map(int, step))
    return RankEnvironment(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=per_node[node],
        master_addr=env.get("MASTER_ADDR") or first_node,
        master_port=port,
        source="slurm",
        largest_node=max(per_node),
        key=".".join(["slurm", env.get("SLURM_CLUSTER_NAME", ""), *step]),
        ports=ports,
    )


def _ports(env: Mapping[str, str], job: int, step: int = 0, restart: int = 0) -> tuple[int, tuple[int, ...]]:
    """Returns MASTER_PORT and no candidates if it is set, else the first candidate port and all candidate ports."""
    if env.get("MASTER_PORT"):
        return _number(env, "MASTER_PORT"), ()
    ports = candidate_ports(job=job, step=step, restart=restart)
    return ports[0], ports


# -- MPI ---------------------------------------------------------------------------------------------------------------

_RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def _read_mpi(env: Mapping[str, str]) -> _MpiRank | None:
    rank = next((name for name in _RANKS if env.get(name)), None)
    size = next((name for name in _SIZES if env.get(name)), None)
    if rank is not None and size is None and env[rank] != "0" and not _in_step(env):
        raise RankEnvironmentError(
            f"{rank}={env[rank]}, but none of {', '.join(_SIZES)} is set, so the number of ranks is unknown. "
            "Start the ranks with srun, torchrun or mpirun, or set HPCACCEL_ALONE=1 if each should train alone"
        )
    if rank is None or size is None:
        return None
    local_rank = next((name for name in _LOCAL_RANKS if env.get(name)), None)
    local_size = next((name for name in _LOCAL_SIZES if env.get(name)), None)
    found = _MpiRank(
        _number(env, rank),
        _number(env, size, least=1),
        None if local_rank is None else _number(env, local_rank),
        None if local_size is None else _number(env, local_size, least=1),
    )
    if found.rank >= found.size:
        raise RankEnvironmentError(f"{rank}={found.rank} must be less than {size}={found.size}")
    return found


def _started_inside_step(env: Mapping[str, str], mpi: _MpiRank | None) -> bool:
    """Whether mpirun started the ranks inside a Slurm step. If srun did, the MPI and Slurm values agree."""
    if mpi is None or mpi.size == 1:
        return False
    return (str(mpi.rank), str(mpi.size)) != (env.get("SLURM_PROCID"), _tasks(env))


def _from_mpi(env: Mapping[str, str], mpi: _MpiRank) -> RankEnvironment:
    rank, world, local_rank, local_world = mpi
    if world > 1 and local_rank is None:
        raise RankEnvironmentError(
            f"the MPI launcher of rank {rank} of {world} does not set a local rank. "
            f"Set one of {', '.join(_LOCAL_RANKS)}, or start the ranks with srun or torchrun"
        )
    local_world = local_world or world
    job = next((env[name] for name in _JOBS if env.get(name)), None)
    port, ports = _ports(env, _hash(job)) if job else (_number(env, "MASTER_PORT", default=DEFAULT_PORT), ())
    return RankEnvironment(
        rank=rank,
        world_size=world,
        local_rank=local_rank or 0,
        local_world_size=local_world,
        master_addr=env.get("MASTER_ADDR") or _first_node(env, rank, world, local_world),
        master_port=port,
        source="mpi",
        largest_node=local_world,
        key=f"mpi.{job or ''}",
        ports=ports,
    )


def _hash(job: str) -> int:
    """A number derived from a job's id, the same in all processes."""
    return sum(number * 131 + ord(letter) * 7919 ** (number % 3) for number, letter in enumerate(job))


def _first_node(env: Mapping[str, str], rank: int, world: int, local_world: int) -> str:
    if world == local_world:
        return "127.0.0.1"
    if nodes := env.get("SLURM_JOB_NODELIST"):
        return hostlist.expand(nodes)[0]
    raise RankEnvironmentError(
        f"rank {rank} of {world}: this node has only {local_world} of the ranks, and MASTER_ADDR is not set. "
        "Set it to the host name of rank 0's node, e.g. mpirun -x MASTER_ADDR=$(hostname)"
    )


def _number(env: Mapping[str, str], name: str, *, least: int = 0, default: int | None = None) -> int:
    text = env.get(name)
    if not text:
        if default is not None:
            return default
        raise RankEnvironmentError(f"{name} is not set, but other launcher variables are: use srun, torchrun or mpirun")
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise RankEnvironmentError(f"{name}={text!r} must be an integer >= {least}")
    return value
