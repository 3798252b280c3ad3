"""The shim of a rank: sets the environment that every launcher agrees on, then becomes the user's program.

It execs, so ``__main__``, the exit code and the memory are the program's own. For a cooperative program SIGTERM and
SIGUSR2 are blocked first: the mask and what is pending survive exec, so a signal that arrives during ``import torch``
is delivered once the runtime has installed its handlers and unblocked them.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from typing import NoReturn

from hpcaccel.core.records import PROTOCOL
from hpcaccel.core.run_dir import RunDir, write_json
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.node.launch_spec import Launch, read_launch
from hpcaccel.node.rank_log import log_to
from hpcaccel.node.sweep.slots import SLOT, Slot
from hpcaccel.slurm import hostlist

__all__ = ["become", "become_program", "enter", "program", "python_of", "python_path", "rank_environment"]


def become_program(run: RunDir) -> NoReturn:
    """Replace this process by the user's program.

    Raises:
        RankEnvironmentError: the environment is not a rank's, or the program cannot be started.
    """
    launch = read_launch(run)
    theirs = {signal.SIGTERM, signal.SIGUSR2}  # where torchrun starts the ranks they are blocked already
    signal.pthread_sigmask(signal.SIG_BLOCK if launch.cooperative else signal.SIG_UNBLOCK, theirs)
    environment = rank_environment(run, launch, dict(os.environ))
    if environment["RANK"] == "0" and "SLURM_STEP_ID" in environment:
        attempt = run.attempt(int(environment["HPCACCEL_ATTEMPT"]))
        write_json(
            attempt / "step.json", {"job_id": environment["SLURM_JOB_ID"], "step_id": environment["SLURM_STEP_ID"]}
        )
    if launch.launcher == "torchrun" or "SLURM_STEP_ID" in environment:
        log_to(run.rank_log(int(environment["HPCACCEL_ATTEMPT"]), environment["RANK"]))
    if launch.container is not None:
        enter(launch.container.workdir)
    become(_command(run, launch, environment), environment)


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Raises RankEnvironmentError where the program cannot be started."""
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        raise RankEnvironmentError(
            f"cannot start {command[0]!r}: {error.strerror}. Is it on every node, and executable?"
        ) from None


def enter(workdir: str) -> None:
    """Not every container runtime has an option for the directory.

    Raises:
        RankEnvironmentError: there is no such directory.
    """
    try:
        os.chdir(workdir)
    except OSError as error:
        raise RankEnvironmentError(f"container.workdir {workdir!r}: {error.strerror} inside of the container") from None


def _command(run: RunDir, launch: Launch, environment: dict[str, str]) -> list[str]:
    if launch.callable:
        return [python_of(launch, environment), "-m", "submitit.core._submit", str(run.submitit)]
    return program(launch.program, launch, environment)


def program(words: Sequence[str], launch: Launch, environment: dict[str, str]) -> list[str]:
    """A program's words with the interpreter's path where they name it."""
    return [python_of(launch, environment), *words[1:]] if words[0] == "{python}" else list(words)


def python_path(launch: Launch, environment: Mapping[str, str]) -> str:
    """The run's own code in front of what is there."""
    return os.pathsep.join([*launch.pythonpath, *filter(None, [environment.get("PYTHONPATH")])])


def python_of(launch: Launch, environment: dict[str, str]) -> str:
    if launch.python:
        return launch.python
    for name in ("python", "python3"):
        if found := shutil.which(name, path=environment.get("PATH")):
            return found
    raise RankEnvironmentError("no python on PATH after the job's setup; set environment.python, venv or conda")


def rank_environment(run: RunDir, launch: Launch, env: dict[str, str]) -> dict[str, str]:
    """torchrun's variables and hpcaccel's own, from what srun or the local launcher set.

    Raises:
        RankEnvironmentError: srun started another number of tasks than the run has ranks.
    """
    if "RANK" not in env:
        env.update(_from_slurm(launch, env))
    env["HPCACCEL_RUN_DIR"] = str(run.path)
    # As with what goes through hpcaccel.log, rank 0's word counts; a file for each rank would be too many.
    attempt = int(env.get("HPCACCEL_ATTEMPT", "1"))
    env["HPCACCEL_METRICS"] = str(run.foreign_metrics(attempt)) if env["RANK"] == "0" else os.devnull
    env["HPCACCEL_PROTOCOL"] = str(PROTOCOL)
    env.setdefault("WORLD_SIZE", str(launch.ranks))
    if SLOT in env and (gpus := env.get("CUDA_VISIBLE_DEVICES")):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(Slot.parse(env.pop(SLOT)).visible(gpus.split(",")))
    if launch.pythonpath:
        env["PYTHONPATH"] = python_path(launch, env)
    if launch.loader_shield is not None and not launch.cooperative:
        env["PYTHONPATH"] = os.pathsep.join([launch.loader_shield, *filter(None, [env.get("PYTHONPATH")])])
    if launch.callable:
        env.update(_for_submitit(launch, env))
    return env


def _from_slurm(launch: Launch, env: dict[str, str]) -> dict[str, str]:
    try:
        rank, world, local, node = (int(env[f"SLURM_{name}"]) for name in ("PROCID", "NTASKS", "LOCALID", "NODEID"))
    except KeyError as error:
        raise RankEnvironmentError(f"{error.args[0]} is not set: a rank is started by srun or by hpcaccel") from None
    if world != launch.ranks:
        raise RankEnvironmentError(
            f"srun started {world} tasks, the run has {launch.nodes} nodes x {launch.ranks_per_node} ranks. "
            "Leave --ntasks out of srun.extra"
        )
    per_node = hostlist.tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_node[node]),
        "GROUP_RANK": str(node),
    }


def _for_submitit(launch: Launch, env: dict[str, str]) -> dict[str, str]:
    """What submitit's own process reads to find its pickle and to name its result."""
    if not launch.local:
        return {"SUBMITIT_EXECUTOR": "slurm"}
    return {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": env.get("HPCACCEL_LOCAL_JOB", "local"),
        "SUBMITIT_LOCAL_NTASKS": env["WORLD_SIZE"],
        "SUBMITIT_LOCAL_GLOBALID": env["RANK"],
        "SUBMITIT_LOCAL_LOCALID": env["LOCAL_RANK"],
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
    }
