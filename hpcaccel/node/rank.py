"""The ranks' shim on the nodes, which execs a rank's program.

The shim sets the same environment for every launcher, opens the log if needed, then calls exec, so that
``__main__``, the exit code and the memory are the program's own. For a cooperative program, the shim first blocks
SIGTERM and SIGUSR2. The signal mask and pending signals survive exec, so a signal that arrives during ``import torch``
is delivered once the runtime has installed its handlers and unblocked both signals.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.launch_spec import LaunchSpec, read_launch
from hpcaccel.core.rank_protocol import PROTOCOL
from hpcaccel.core.run_dir import RUN_DIR, RunDir
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.slurm import hostlist

if TYPE_CHECKING:
    from hpcaccel.node.allocation import Slot

__all__ = [
    "LONGEST",
    "RESUME_ARGS",
    "WARM",
    "attempt_variables",
    "become",
    "become_program",
    "enter",
    "log_to",
    "program",
    "python_of",
    "python_path",
    "rank_arguments",
    "rank_environment",
    "read_tail",
]


RESUME_ARGS = "HPCACCEL_RESUME_ARGS"
"""Environment variable with further arguments for the program, as a JSON list."""
_SLOT = "HPCACCEL_SLOT"
"""``SLOT`` of ``node.allocation``, which this module imports only for a trial that shares its GPUs: each rank waits for
the imports here."""
WARM = "HPCACCEL_WARM"
"""Environment variable of the ranks' shim: how its warm parent reaches the supervisor (JSON)."""
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables in which Slurm lists a step's GPUs, of NVIDIA, AMD and Intel. It may set all of them."""
AMD_DRIVER = Path("/dev/kfd")
TAIL_BYTES = 64_000
LONGEST = 500
"""Maximum length of a text from a log in the ledger, in characters. Longer texts are cut."""


def read_tail(path: Path) -> str:
    """The last 64 kB of a log."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        return file.read().decode(errors="replace")


def log_to(path: Path) -> None:
    """Append the standard output and error of this process and its children to the file ``path``. The file may already
    contain output of the same attempt, and slurmstepd on this node also writes messages to the file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    if log not in (1, 2):
        os.close(log)


def become_program(run: RunDir) -> NoReturn:
    """Replace this process with the user's program.

    Raises:
        RankEnvironmentError: the environment does not describe a rank, or the program cannot be started.
    """
    launch = read_launch(run)
    theirs = {signal.SIGTERM, signal.SIGUSR2}  # already blocked if torchrun starts the ranks
    signal.pthread_sigmask(signal.SIG_BLOCK if launch.cooperative else signal.SIG_UNBLOCK, theirs)
    address = os.environ.pop(WARM, None)
    environment = rank_environment(run, launch, dict(os.environ))
    if environment["RANK"] == "0" and "SLURM_STEP_ID" in environment:
        attempt = run.attempt(int(environment["HPCACCEL_ATTEMPT"]))
        write_json(
            attempt / "step.json", {"job_id": environment["SLURM_JOB_ID"], "step_id": environment["SLURM_STEP_ID"]}
        )
    command = _command(run, launch, environment)
    if address is not None:
        from hpcaccel.node.warm.start_warm import continue_as_rank

        continue_as_rank(address, command, environment)
    if launch.launcher == "torchrun" or "SLURM_STEP_ID" in environment:
        log_to(run.rank_log(int(environment["HPCACCEL_ATTEMPT"]), environment["RANK"]))
    if launch.container is not None:
        enter(launch.container.workdir)
    become(command, environment)


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process with ``command``.

    Raises:
        RankEnvironmentError: the program cannot be started.
    """
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        raise RankEnvironmentError(
            f"cannot start {command[0]!r}: {error.strerror}. Check that it exists on every node and is executable"
        ) from None


def enter(workdir: str) -> None:
    """Change to the container's working directory. Not every container runtime has an option for it.

    Raises:
        RankEnvironmentError: the directory does not exist in the container, or cannot be entered.
    """
    try:
        os.chdir(workdir)
    except OSError as error:
        raise RankEnvironmentError(
            f"container.workdir {workdir!r}: {error.strerror} inside the container. Set it to a directory of the "
            "image or of container.mounts"
        ) from None


def _command(run: RunDir, launch: LaunchSpec, environment: dict[str, str]) -> list[str]:
    if launch.callable:
        return [python_of(launch, environment), *rank_arguments(run, launch, ())]
    resume_args: list[str] = json.loads(environment.pop(RESUME_ARGS, "[]"))
    return program(run, [*launch.program, *resume_args], launch, environment)


def program(run: RunDir, arguments: Sequence[str], launch: LaunchSpec, environment: dict[str, str]) -> list[str]:
    """The program's command line: ``arguments``, with a leading ``{python}`` replaced by the interpreter and each
    ``{run_dir}`` by the run's directory."""
    words = [word.replace(RUN_DIR, str(run.path)) for word in arguments]
    return [python_of(launch, environment), *words[1:]] if words[0] == "{python}" else words


def python_path(launch: LaunchSpec, environment: Mapping[str, str]) -> str:
    """PYTHONPATH with the run's own directories first."""
    return os.pathsep.join([*launch.pythonpath, *filter(None, [environment.get("PYTHONPATH")])])


def python_of(launch: LaunchSpec, environment: dict[str, str]) -> str:
    """The ranks' interpreter: the one that the spec sets, else the first ``python`` on PATH, else ``python3``.

    Raises:
        RankEnvironmentError: the spec sets none, and neither ``python`` nor ``python3`` is on PATH.
    """
    if launch.python:
        return launch.python
    for name in ("python", "python3"):
        if found := shutil.which(name, path=environment.get("PATH")):
            return found
    raise RankEnvironmentError(
        "no python on PATH after the set-up: set environment.python, environment.venv or environment.conda"
    )


def _restrict_gpus(env: dict[str, str], slot: Slot) -> None:
    """Restrict this rank to the slot's part of the step's GPUs, in place.

    AMD's HIP reads CUDA_VISIBLE_DEVICES as numbers among the GPUs that ROCR_VISIBLE_DEVICES leaves, so only one of the
    two may be set.
    """
    for name in GPU_VARIABLES:
        if gpus := env.get(name):
            env[name] = ",".join(slot.visible(gpus.split(",")))
    if env.get("ROCR_VISIBLE_DEVICES") and AMD_DRIVER.exists():
        env.pop("CUDA_VISIBLE_DEVICES", None)
        env.pop("HIP_VISIBLE_DEVICES", None)


def rank_environment(run: RunDir, launch: LaunchSpec, env: dict[str, str]) -> dict[str, str]:
    """Add torchrun's variables (RANK, WORLD_SIZE, …) and hpcaccel's own to ``env``. Their values are derived from the
    variables of srun or of the local launcher. Returns ``env``.

    Raises:
        RankEnvironmentError: an srun variable is missing, or the number of tasks differs from the number of ranks.
    """
    if "RANK" not in env:
        env.update(_from_slurm(launch, env))
    env["HPCACCEL_RUN_DIR"] = str(run.path)
    env["HPCACCEL_PROTOCOL"] = str(PROTOCOL)
    env.setdefault("WORLD_SIZE", str(launch.ranks))
    own = attempt_variables(run, int(env.get("HPCACCEL_ATTEMPT", "1")), rank=int(env["RANK"]))
    env.update({"TORCHELASTIC_RUN_ID": own["TORCHELASTIC_RUN_ID"], **env, "HPCACCEL_METRICS": own["HPCACCEL_METRICS"]})
    if _SLOT in env and any(env.get(name) for name in GPU_VARIABLES):
        from hpcaccel.node.allocation import Slot

        _restrict_gpus(env, Slot.parse(env.pop(_SLOT)))
    if launch.pythonpath:
        env["PYTHONPATH"] = python_path(launch, env)
    if launch.loader_shield is not None and not launch.cooperative:
        env["PYTHONPATH"] = os.pathsep.join([launch.loader_shield, *filter(None, [env.get("PYTHONPATH")])])
    if launch.bridge is not None:
        env["PYTHONPATH"] = os.pathsep.join([launch.bridge, *filter(None, [env.get("PYTHONPATH")])])
    if launch.callable:
        env.update(_for_submitit(launch, env))
    return env


def attempt_variables(run: RunDir, attempt: int, *, rank: int) -> dict[str, str]:
    """The variables of a rank's environment that are derived from the attempt's number."""
    return {
        # Only rank 0 logs metrics, as with hpcaccel.log: one file for each rank would be too many.
        "HPCACCEL_METRICS": str(run.foreign_metrics(attempt)) if rank == 0 else os.devnull,
        # Makes Lightning take its ranks from torchrun's variables instead of Slurm's, and leave requeueing to hpcaccel.
        "TORCHELASTIC_RUN_ID": f"{run.run_id}.{attempt}",
    }


def rank_arguments(run: RunDir, launch: LaunchSpec, resume_args: Sequence[str]) -> list[str]:
    """The words after Python in the command line of a rank whose program is started by Python."""
    if launch.callable:
        return ["-m", "submitit.core._submit", str(run.submitit)]
    return [word.replace(RUN_DIR, str(run.path)) for word in [*launch.program, *resume_args]][1:]


def _from_slurm(launch: LaunchSpec, env: dict[str, str]) -> dict[str, str]:
    try:
        rank, world, local, node = (int(env[f"SLURM_{name}"]) for name in ("PROCID", "NTASKS", "LOCALID", "NODEID"))
    except KeyError as error:
        raise RankEnvironmentError(
            f"{error.args[0]} is not set: ranks must be started by srun or by hpcaccel"
        ) from None
    wanted = int(env.get("WORLD_SIZE", launch.ranks))  # of this attempt: it may use more or fewer nodes than others
    if world != wanted:
        raise RankEnvironmentError(
            f"srun started {world} tasks, but the attempt has {wanted} ranks, {launch.ranks_per_node} on each node. "
            "Remove --ntasks from srun.extra"
        )
    per_node = hostlist.tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_node[node]),
        "GROUP_RANK": str(node),
    }


def _for_submitit(launch: LaunchSpec, env: dict[str, str]) -> dict[str, str]:
    """Environment variables with which submitit's process finds its pickle and chooses the file name of its result."""
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
