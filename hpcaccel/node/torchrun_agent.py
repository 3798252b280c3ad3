"""The shim of a node's torchrun, which execs torchrun.

It blocks SIGTERM and SIGUSR2: Slurm signals every process of a job step, and torchrun would end its ranks in the middle
of a training step.
"""

from __future__ import annotations

import os
import pkgutil
import signal
from collections.abc import Mapping
from typing import NoReturn

from hpcaccel.core.launch_spec import LaunchSpec, read_launch
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.node.rank import log_to, python_of

__all__ = ["become_agent", "torchrun_arguments"]


def torchrun_arguments(run: RunDir, launch: LaunchSpec, env: Mapping[str, str], python: str) -> list[str]:
    """torchrun's arguments. ``--max-restarts=0``, because the supervisor, not torchrun, decides on restarts."""
    return [
        f"--nnodes={int(env.get('WORLD_SIZE', launch.ranks)) // launch.ranks_per_node}",  # of this attempt
        f"--nproc-per-node={launch.ranks_per_node}",
        f"--node-rank={_node_rank(env)}",
        f"--master-addr={env['MASTER_ADDR']}",
        f"--master-port={env['MASTER_PORT']}",
        "--max-restarts=0",
        "--monitor-interval=0.5",
        "--no-python",
        python,
        str(run.node_program),
        "rank",
        str(run.path),
    ]


def _node_rank(env: Mapping[str, str]) -> int:
    return int(env.get("SLURM_NODEID", "0"))


def become_agent(run: RunDir) -> NoReturn:
    """Replace this process with torchrun.

    Raises:
        RankEnvironmentError: MASTER_ADDR is not set, no Python is found, or Python cannot be started.
    """
    launch = read_launch(run)
    environment = dict(os.environ)
    if "MASTER_ADDR" not in environment:
        raise RankEnvironmentError("MASTER_ADDR is not set: a node's torchrun must be started by hpcaccel")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    attempt = int(environment.get("HPCACCEL_ATTEMPT", "1"))
    log_to(run.rank_log(attempt, _node_rank(environment) * launch.ranks_per_node))
    python = python_of(launch, environment)
    arguments = torchrun_arguments(run, launch, environment, python)
    # torchrun sets these itself. It would take the present WORLD_SIZE, the number of ranks, for that of the agents.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        environment.pop(name, None)
    source = pkgutil.get_data("hpcaccel.node", "torchrun_program.py")  # also works inside node.pyz
    assert source is not None
    try:
        os.execvpe(python, [python, "-c", source.decode(), *arguments], environment)
    except OSError as error:
        raise RankEnvironmentError(
            f"cannot start {python!r}: {error.strerror}. Check that it exists on every node"
        ) from None
