"""Which rank this process is, of how many, and where they meet.

torchrun's variables count first (hpcaccel's own launcher sets them too), then those of a Slurm job step, then those of
an MPI launcher, else the process is alone. What looks like several ranks but would train as several lonely ones is an
error: N silent copies that overwrite each other's files are the dearest mistake of all. Where it is meant,
``HPCACCEL_ALONE=1`` says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hpcaccel.errors import RankEnvironmentError
from hpcaccel.slurm import hostlist

__all__ = ["RankEnvironment", "detect", "is_set"]

FIRST_PORT = 20_000
PORTS = 12_000
"""Up to where Linux begins to give out ports by itself."""
CANDIDATES = 16
STRIDE = 997
"""Between a step's candidates; no divisor of PORTS, so that they differ."""
FIRST_SPECIAL_STEP = 0xFFFFFFFA
"""Slurm's numbers for an interactive shell, the batch script and their like, which are no steps of ranks."""
UNNAMED_PORT = 29_500
"""Where ranks of an MPI launcher meet that says nothing to tell two jobs apart: torch's usual port."""


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """This process's place in its group. Local means on this node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    source: Literal["torchrun", "slurm", "mpi", "script", "single"]
    largest_node: int = 1
    """How many ranks the node with most of them has."""
    key: str = ""
    """What this group is called, to tell it from others on the same machines."""
    ports: tuple[int, ...] = ()
    """Where rank 0 may wait, in this order; empty: at ``master_port``, which somebody has chosen."""

    @property
    def variables(self) -> dict[str, str]:
        """torchrun's variables for this place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


ALONE = RankEnvironment(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    master_addr="127.0.0.1",
    master_port=0,
    source="single",
)


class _Counted(NamedTuple):
    """What an MPI launcher says."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


def detect(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Read the environment.

    Raises:
        RankEnvironmentError: the variables are incomplete, contradict each other, or describe a step of several tasks
            in which every task believes that it is alone.
    """
    env = os.environ if environ is None else environ
    if is_set("HPCACCEL_ALONE", env):
        return ALONE
    if "RANK" in env:
        return _from_torchrun(env)
    counted = _count_mpi(env)
    if _in_step(env) and not _started_inside_step(env, counted):
        return _from_slurm(env)
    if counted is not None:
        return _from_mpi(env, counted)
    if _number(env, "WORLD_SIZE", least=1, default=1) > 1:
        raise RankEnvironmentError(
            f"WORLD_SIZE={env['WORLD_SIZE']}, but RANK is not set: nobody says which of the ranks this process is. "
            "Start the ranks with hpcaccel submit, srun or torchrun, or unset WORLD_SIZE"
        )
    return ALONE


def is_set(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a variable says yes."""
    env = os.environ if environ is None else environ
    return env.get(name, "").strip().lower() in ("1", "true", "yes", "y", "on")


# -- torchrun ----------------------------------------------------------------------------------------------------------


def _from_torchrun(env: Mapping[str, str]) -> RankEnvironment:
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE", least=1)
    if rank >= world:
        raise RankEnvironmentError(f"RANK={rank} must be less than WORLD_SIZE={world}")
    _refuse_lonely_tasks(env, rank, world)
    if world > 1:
        for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not env.get(name):
                raise RankEnvironmentError(
                    f"WORLD_SIZE={world} but {name} is not set. Start the ranks with hpcaccel submit, srun or torchrun"
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
        # torchrun's own store outlives a restart of its ranks.
        key=f"torchrun.{env.get('TORCHELASTIC_RUN_ID', '')}.{env.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def _refuse_lonely_tasks(env: Mapping[str, str], rank: int, world: int) -> None:
    tasks = _tasks(env)
    # A supervisor that starts one rank inside somebody's larger step knows what it does.
    if not _in_step(env) or tasks == "1" or "HPCACCEL_PROTOCOL" in env:
        return
    if world == 1:
        raise RankEnvironmentError(
            f"this Slurm step has SLURM_NTASKS={tasks} tasks, but WORLD_SIZE=1: every task would train alone and "
            "overwrite the others' files. Unset RANK and WORLD_SIZE, start one task with srun --ntasks=1, or say "
            "HPCACCEL_ALONE=1 if each is to train by itself"
        )
    if rank == 0 and env.get("SLURM_PROCID", "0") != "0" and "TORCHELASTIC_RUN_ID" not in env:
        raise RankEnvironmentError(
            f"RANK=0, but this is task {env['SLURM_PROCID']} of {tasks} (SLURM_PROCID): RANK seems to have been set "
            "for all tasks alike. Unset RANK and WORLD_SIZE: a Slurm step needs neither"
        )


# -- a Slurm step ------------------------------------------------------------------------------------------------------


def _in_step(env: Mapping[str, str]) -> bool:
    """A task of srun's; shells of sbatch and salloc have most of its variables too."""
    step = env.get("SLURM_STEP_ID", "")
    return bool(step) and not (step.isdigit() and int(step) >= FIRST_SPECIAL_STEP)


def _tasks(env: Mapping[str, str]) -> str:
    # SLURM_NTASKS may be the job's, where a step's variables have come along into another shell.
    return env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or "1"


def _from_slurm(env: Mapping[str, str]) -> RankEnvironment:
    name = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    rank, world = _number(env, "SLURM_PROCID"), _number(env, name, least=1)
    local_rank, node = _number(env, "SLURM_LOCALID"), _number(env, "SLURM_NODEID")
    if rank >= world:
        raise RankEnvironmentError(f"SLURM_PROCID={rank} must be less than {name}={world}")
    said = env.get("WORLD_SIZE")
    if said and said != str(world):
        raise RankEnvironmentError(
            f"WORLD_SIZE={said}, but this Slurm step has {world} tasks. Unset WORLD_SIZE, or start as many tasks: "
            f"srun --ntasks={said}"
        )
    layout = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(world)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    try:
        per_node, first_node = hostlist.tasks_per_node(layout), hostlist.expand(nodes)[0]
    except ValueError as error:
        raise RankEnvironmentError(f"this Slurm step's variables cannot be read: {error}") from None
    if node >= len(per_node):
        raise RankEnvironmentError(f"SLURM_NODEID={node}, but the step's layout {layout!r} has {len(per_node)} nodes")
    port, ports = _ports(env, *(int(env.get(part, "0") or 0) for part in _STEP_PARTS))
    return RankEnvironment(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=per_node[node],
        master_addr=env.get("MASTER_ADDR") or first_node,
        master_port=port,
        source="slurm",
        largest_node=max(per_node),
        key=".".join(
            ["slurm", env.get("SLURM_CLUSTER_NAME", ""), *(env.get(part, "0") or "0" for part in _STEP_PARTS)]
        ),
        ports=ports,
    )


_STEP_PARTS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


def _ports(env: Mapping[str, str], job: int, step: int, restart: int) -> tuple[int, tuple[int, ...]]:
    """The same ports in every task of a step, others for its neighbours and after a requeue; the user's own wins."""
    if env.get("MASTER_PORT"):
        return _number(env, "MASTER_PORT"), ()
    first = job * 97 + step * 13 + restart * 7
    ports = tuple(FIRST_PORT + (first + number * STRIDE) % PORTS for number in range(CANDIDATES))
    return ports[0], ports


# -- MPI ---------------------------------------------------------------------------------------------------------------

_RANKS = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")
_JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def _count_mpi(env: Mapping[str, str]) -> _Counted | None:
    rank = next((name for name in _RANKS if env.get(name)), None)
    size = next((name for name in _SIZES if env.get(name)), None)
    if rank is not None and size is None and env[rank] != "0" and not _in_step(env):
        raise RankEnvironmentError(
            f"{rank}={env[rank]}, but none of {', '.join(_SIZES)} is set: of how many ranks? "
            "Start them with srun, torchrun or mpirun, or say HPCACCEL_ALONE=1 if each is to train by itself"
        )
    if rank is None or size is None:
        return None
    local_rank = next((name for name in _LOCAL_RANKS if env.get(name)), None)
    local_size = next((name for name in _LOCAL_SIZES if env.get(name)), None)
    counted = _Counted(
        _number(env, rank),
        _number(env, size, least=1),
        None if local_rank is None else _number(env, local_rank),
        None if local_size is None else _number(env, local_size, least=1),
    )
    if counted.rank >= counted.size:
        raise RankEnvironmentError(f"{rank}={counted.rank} must be less than {size}={counted.size}")
    return counted


def _started_inside_step(env: Mapping[str, str], counted: _Counted | None) -> bool:
    """Whether the step is mpirun's own, one task a node, and the ranks are what it started there. Under srun itself
    both launchers count the same."""
    if counted is None or counted.size == 1:
        return False
    return (str(counted.rank), str(counted.size)) != (env.get("SLURM_PROCID"), _tasks(env))


def _from_mpi(env: Mapping[str, str], counted: _Counted) -> RankEnvironment:
    rank, world, local_rank, local_world = counted
    if world > 1 and local_rank is None:
        raise RankEnvironmentError(
            f"this is rank {rank} of {world} of an MPI launcher that does not say which of its node's ranks it is. "
            f"Set one of {', '.join(_LOCAL_RANKS)}, or start the ranks with srun or torchrun"
        )
    local_world = local_world or world
    job = next((env[name] for name in _JOBS if env.get(name)), None)
    port, ports = (UNNAMED_PORT, ()) if job is None else _ports(env, _spread(job), 0, 0)
    if job is None and env.get("MASTER_PORT"):
        port = _number(env, "MASTER_PORT")
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


def _spread(job: str) -> int:
    """A number for a job's name, the same in every process."""
    return sum(number * 131 + ord(letter) * 7919 ** (number % 3) for number, letter in enumerate(job))


def _first_node(env: Mapping[str, str], rank: int, world: int, local_world: int) -> str:
    if world == local_world:
        return "127.0.0.1"
    nodes = env.get("SLURM_JOB_NODELIST")
    if nodes:
        return hostlist.expand(nodes)[0]
    raise RankEnvironmentError(
        f"rank {rank} of {world}: {local_world} of them are on this node, and MASTER_ADDR is not set. "
        "Set it to the name of the node of rank 0, e.g. mpirun -x MASTER_ADDR=$(hostname)"
    )


def _number(env: Mapping[str, str], name: str, *, least: int = 0, default: int | None = None) -> int:
    text = env.get(name)
    if not text:
        if default is not None:
            return default
        raise RankEnvironmentError(f"{name} is not set, though other variables of the same launcher are")
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise RankEnvironmentError(f"{name}={text!r} must be a whole number of at least {least}")
    return value
