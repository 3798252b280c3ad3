"""Start ranks from within a program, such as a notebook or a test. Processes are forked, so the function may be defined
in a notebook cell or be a closure, and modules are not imported again.

Two things do not survive a fork: the GPU context and the threads of OpenMP. So ``notebook_launcher`` refuses to run in
a process that has used a GPU, and each rank computes with one thread by default.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpcaccel.errors import RunFailed, RuntimeMisuse
from hpcaccel.runtime.compat.availability import check_os_kernel
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.enums import PrecisionType
from hpcaccel.runtime.launch_env import patch_environment

__all__ = ["debug_launcher", "notebook_launcher"]

STORE_SECONDS = 300.0
"""Timeout of the store through which the ranks of ``debug_launcher`` connect."""


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Call ``function(*args)`` in ``num_processes`` ranks on this machine's CPU.

    Raises:
        RunFailed: the function failed, or a rank exited early. If the function failed, the message contains the
            traceback of the first rank to fail.
        RuntimeMisuse: this process already has an Accelerator or a process group.
    """
    _refuse_group("debug_launcher")
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

    # This process holds the store, so that no other program can take its port before the ranks connect.
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=STORE_SECONDS), wait_for_workers=False)
    shared = {
        "WORLD_SIZE": num_processes,
        "LOCAL_WORLD_SIZE": num_processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "ACCELERATE_USE_CPU": "yes",
        "ACCELERATE_MIXED_PRECISION": "no",
        "FORK_LAUNCHED": "1",
    }
    with _without_launchers(), patch_environment(**shared), _fork_allowed():
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _be_rank, args=(function, tuple(args)), nprocs=num_processes, start_method="fork"
            )
        except ProcessRaisedException as error:
            raise RunFailed(
                f"rank {error.error_index} of {num_processes} failed:\n{_from_function(str(error))}"
            ) from None
        except ProcessExitedException as error:
            raise RunFailed(f"rank {error.error_index} of {num_processes} exited early: {error}") from None


def _be_rank(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    _run_as_rank(function, args)


def _from_function(text: str) -> str:
    """``text``, a traceback, without the frames of hpcaccel and torch that called the user's function."""
    before, call, after = text.partition(f"    {_CALL}\n")
    return f"Traceback (most recent call last):\n{after}" if call else before


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Call ``function(*args)`` in ``num_processes`` ranks on this node. With several nodes, call this on each node.

    The ranks are started as by torchrun. A single rank runs in this process, and raises the function's own errors.

    Args:
        num_processes: number of ranks on this node. By default, one per GPU, or one if there is no GPU.
        mixed_precision: default precision of ``Accelerator()`` in the ranks.
        use_port, master_addr: port and address of the rendezvous. On a single node, port 0 means any free port.
        node_rank, num_nodes: this node's index, from 0, and the number of nodes.
        rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id, max_restarts, monitor_interval, log_line_prefix_template: the
            same as torchrun's options.

    Raises:
        RunFailed: one of several ranks failed. The message contains the traceback of the first rank to fail.
        RuntimeMisuse: an argument is not allowed; or there are several ranks, and this process has used a GPU, or
            already has an Accelerator or a process group.
    """
    count = _process_count(num_processes, mixed_precision, node_rank=node_rank, num_nodes=num_nodes)
    with patch_environment(accelerate_mixed_precision=mixed_precision.lower()):
        if count * num_nodes == 1:
            print("hpcaccel: launching training in this process", file=sys.stderr)
            function(*args)
            return
        _refuse_group("notebook_launcher")
        _refuse_used_gpu()
        check_os_kernel()
        processes = "1 process" if count == 1 else f"{count} processes"
        print(f"hpcaccel: launching training in {processes} on node {node_rank + 1} of {num_nodes}", file=sys.stderr)
        endpoint = rdzv_endpoint or f"{master_addr}:{use_port}"
        _launch_elastic(
            function,
            args,
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            nproc_per_node=count,
            run_id=rdzv_id,
            rdzv_endpoint=endpoint,
            rdzv_backend=rdzv_backend,
            rdzv_configs={**(rdzv_conf or {}), **({"rank": node_rank} if rdzv_backend == "static" else {})},
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            log_line_prefix_template=log_line_prefix_template,
        )


def _process_count(num_processes: int | None, mixed_precision: str, *, node_rank: int, num_nodes: int) -> int:
    """The number of ranks on this node.

    Raises:
        RuntimeMisuse: an argument is not allowed.
    """
    if mixed_precision.lower() not in PrecisionType:
        raise RuntimeMisuse(
            f"mixed_precision={mixed_precision!r} is not a valid value (allowed: {', '.join(PrecisionType.list())})"
        )
    if not 0 <= node_rank < num_nodes:
        raise RuntimeMisuse(f"node_rank={node_rank} must be at least 0 and less than num_nodes={num_nodes}")
    count = (torch.cuda.device_count() or 1) if num_processes is None else num_processes
    if count < 1:
        raise RuntimeMisuse(f"num_processes={count} must be at least 1")
    return count


def _launch_elastic(function: Callable[..., Any], args: Sequence[Any], **options: Any) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if options["rdzv_backend"] == "static" and options["max_nodes"] == 1 and options["rdzv_endpoint"].endswith(":0"):
        options |= {"rdzv_backend": "c10d", "rdzv_configs": {}}
    start = elastic_launch(LaunchConfig(start_method="fork", **options), entrypoint=_run_as_rank)
    with _without_launchers(), patch_environment(fork_launched="1"), _fork_allowed():
        try:
            start(function, tuple(args))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            text = _callstack(failure.error_file_data) or failure.message
            raise RunFailed(f"rank {rank} failed:\n{_from_function(text)}") from None


def _callstack(error_file: Mapping[str, Any] | None) -> str:
    """The traceback in the error file that torch's ``record`` wrote."""
    found = (error_file or {}).get("message") or ""
    return str(found.get("extraInfo", {}).get("py_callstack") or found) if isinstance(found, Mapping) else str(found)


def _run_as_rank(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Call the function in this rank, then end the rank's session: a forked process runs no ``atexit`` handlers."""
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    function(*args)
    from hpcaccel.runtime.training_session import TrainingSession

    session, world = TrainingSession.existing(), World.existing()
    if session is not None:
        session.end()
    elif world is not None:
        world.destroy()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        # The session handled these signals to stop at a step. There are no more steps, so they may end a waiting rank.
        signal.signal(number, signal.SIG_DFL)


_CALL = "function(*args)"
"""Source line in ``_run_as_rank`` that calls the user's function. Frames after it in a traceback are the user's."""


def _refuse_group(what: str) -> None:
    if World.existing() is not None or dist.is_initialized():
        raise RuntimeMisuse(
            f"{what}() was called in a process that already has an Accelerator, a PartialState or a process group: "
            "create them only inside the function. Restart the notebook's kernel, or call end_training() or "
            "destroy_process_group() first"
        )


def _refuse_used_gpu() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeMisuse(
            "this process has already used a GPU, so the ranks that it forks could not use any GPU. Restart the "
            "notebook's kernel, and keep all code that uses a GPU (tensor.cuda(), torch.cuda.*) inside the function"
        )


@contextmanager
def _without_launchers() -> Iterator[None]:
    """Inside the block, remove the variables that a launcher of this process has set: the ranks would inherit them."""
    names = [name for name in os.environ if name in _LAUNCHERS or name.startswith("SLURM_STEP")]
    held = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(held)


_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@contextmanager
def _fork_allowed() -> Iterator[None]:
    """Silence the warning of Python 3.12 and newer about a fork with several threads: torch starts threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        yield
