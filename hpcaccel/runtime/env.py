"""Which rank this process is, of how many, and where they meet.

torchrun's variables count first (hpcaccel's own launcher sets them too), then those of a Slurm job step, else the
process is alone. What looks like several ranks but would train as several lonely ones is an error: N silent copies
that overwrite each other's files are the dearest mistake of all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hpcaccel.errors import RankEnvironmentError
from hpcaccel.slurm import hostlist

__all__ = ["RankEnvironment", "detect"]

FIRST_PORT = 20_000
PORTS = 20_000


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """This process's place in its group. Local means on this node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    source: Literal["torchrun", "slurm", "single"]

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


def detect(environ: Mapping[str, str] | None = None) -> RankEnvironment:
    """Read the environment.

    Raises:
        RankEnvironmentError: the variables are incomplete, contradict each other, or describe a step of several tasks
            in which every task believes that it is alone.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env or "WORLD_SIZE" in env:
        return _from_torchrun(env)
    if "SLURM_STEP_ID" in env:
        return _from_slurm(env)
    return RankEnvironment(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        master_addr="127.0.0.1",
        master_port=0,
        source="single",
    )


def _from_torchrun(env: Mapping[str, str]) -> RankEnvironment:
    rank, world = _number(env, "RANK"), _number(env, "WORLD_SIZE", least=1)
    if rank >= world:
        raise RankEnvironmentError(f"RANK={rank} must be less than WORLD_SIZE={world}")
    if world == 1:
        _refuse_lonely_tasks(env)
    else:
        for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not env.get(name):
                raise RankEnvironmentError(
                    f"WORLD_SIZE={world} but {name} is not set. Start the ranks with hpcaccel submit, srun or torchrun"
                )
    return RankEnvironment(
        rank=rank,
        world_size=world,
        local_rank=_number(env, "LOCAL_RANK", default=0),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE", least=1, default=1),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", default=0),
        source="torchrun",
    )


def _refuse_lonely_tasks(env: Mapping[str, str]) -> None:
    tasks = env.get("SLURM_NTASKS", "1")
    # A supervisor that starts one rank inside somebody's larger step knows what it does.
    if "SLURM_STEP_ID" in env and tasks != "1" and "HPCACCEL_PROTOCOL" not in env:
        raise RankEnvironmentError(
            f"this Slurm step has SLURM_NTASKS={tasks} tasks, but WORLD_SIZE=1: every task would train alone and "
            "overwrite the others' files. Unset RANK and WORLD_SIZE, or start one task with srun --ntasks=1"
        )


def _from_slurm(env: Mapping[str, str]) -> RankEnvironment:
    rank, world = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS", least=1)
    local_rank, node = _number(env, "SLURM_LOCALID"), _number(env, "SLURM_NODEID")
    if rank >= world:
        raise RankEnvironmentError(f"SLURM_PROCID={rank} must be less than SLURM_NTASKS={world}")
    layout = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(world)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    per_node = hostlist.tasks_per_node(layout)
    if node >= len(per_node):
        raise RankEnvironmentError(f"SLURM_NODEID={node}, but the step's layout {layout!r} has {len(per_node)} nodes")
    return RankEnvironment(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=per_node[node],
        master_addr=env.get("MASTER_ADDR") or hostlist.expand(nodes)[0],
        master_port=_number(env, "MASTER_PORT", default=_port(env)),
        source="slurm",
    )


def _port(env: Mapping[str, str]) -> int:
    """The same port in every task of a step, another one for its neighbours and after a requeue."""
    job, step, restart = (int(env.get(name, "0") or 0) for name in _PORT_PARTS)
    return FIRST_PORT + (job * 97 + step * 13 + restart * 7) % PORTS


_PORT_PARTS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


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
