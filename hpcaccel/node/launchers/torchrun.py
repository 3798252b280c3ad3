"""One torchrun a node, which starts the ranks of the node: the same shim, logs and signals as with a task for each.

The agent blocks SIGTERM and SIGUSR2 before it becomes torchrun: Slurm sends a step's signals to every process in it,
and torchrun would take a SIGTERM as its own, and end its ranks in the middle of a step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import NoReturn

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.node.launch_spec import Launch, read_launch
from hpcaccel.node.rank_log import log_to

__all__ = ["PROGRAM", "become_agent", "torchrun_arguments"]

PROGRAM = """
import sys
try:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main
except ImportError as error:
    sys.exit(f"ImportError: launcher: torchrun needs torch in {sys.executable}: {error}")
try:
    main(sys.argv[1:])
except ChildFailedError as error:
    code = error.get_first_failure()[1].exitcode
    print(error, file=sys.stderr)
    sys.exit(128 - code if code < 0 else code)
"""
"""torchrun itself, except that it ends as its first failed rank did and not always with 1."""


def torchrun_arguments(run: RunDir, launch: Launch, env: Mapping[str, str], python: str) -> list[str]:
    """torchrun's own words. Nothing is restarted by it: that is the supervisor's to decide."""
    return [
        f"--nnodes={launch.nodes}",
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
    """Replace this process by torchrun.

    Raises:
        RankEnvironmentError: Python cannot be started, or no launcher has said where the ranks meet.
    """
    from hpcaccel.node.rank import python_of

    launch = read_launch(run)
    environment = dict(os.environ)
    if "MASTER_ADDR" not in environment:
        raise RankEnvironmentError("MASTER_ADDR is not set: a node's torchrun is started by hpcaccel")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    attempt = int(environment.get("HPCACCEL_ATTEMPT", "1"))
    log_to(run.rank_log(attempt, _node_rank(environment) * launch.ranks_per_node))
    python = python_of(launch, environment)
    words = torchrun_arguments(run, launch, environment, python)
    # torchrun is to make its own of these; and as a rank's, WORLD_SIZE is not the number of agents.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        environment.pop(name, None)
    try:
        os.execvpe(python, [python, "-c", PROGRAM, *words], environment)
    except OSError as error:
        raise RankEnvironmentError(f"cannot start {python!r}: {error.strerror}. Is it on every node?") from None
