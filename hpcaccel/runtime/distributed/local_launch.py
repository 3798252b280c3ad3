"""Starting ranks from inside a program: a notebook, or a test. Processes are forked, so that a function may come from a
notebook's cell or be a closure, and what is imported already is not imported again.

Two things do not survive a fork: a GPU that this process has touched already, which is refused, and OpenMP's threads,
so that the ranks compute with one thread unless they say otherwise.
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
from hpcaccel.runtime.compat.environ import patch_environment
from hpcaccel.runtime.compat.machine_info import check_os_kernel
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.enums import PrecisionType

__all__ = ["debug_launcher", "notebook_launcher"]

STORE_SECONDS = 300.0


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Call ``function(*args)`` in ``num_processes`` ranks on this machine's CPU.

    Raises:
        RunFailed: the function failed; the message holds the traceback of the first rank that did.
        RuntimeMisuse: this process has formed a group of ranks itself.
    """
    _refuse_group("debug_launcher")
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

    # The store is this process's, so that no port can be taken by somebody else in between.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, None, True, timedelta(seconds=STORE_SECONDS), wait_for_workers=False
    )
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
            raise RunFailed(f"rank {error.error_index} of {num_processes} ended early: {error}") from None


def _be_rank(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    _run_as_rank(function, args)


def _from_function(text: str) -> str:
    """A traceback from the user's own function on: how it came to be called is nobody's business."""
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
    """Call ``function(*args)`` in ``num_processes`` ranks on this node, of ``num_nodes`` that all call this.

    They are started as torchrun would. A single rank is this process itself.

    Args:
        num_processes: default: as many as there are GPUs, or one.
        mixed_precision: what ``Accelerator()`` takes in the ranks unless it is told.
        use_port, master_addr: where the ranks meet; port 0 on a single node: one that is free.
        rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id, max_restarts, monitor_interval, log_line_prefix_template: as
            torchrun's options.

    Raises:
        RunFailed: the function failed; the message holds the traceback of the first rank that did.
        RuntimeMisuse: a GPU has been touched or a group formed in this process; an argument that is not allowed.
    """
    if mixed_precision.lower() not in PrecisionType:
        raise RuntimeMisuse(
            f"mixed_precision={mixed_precision!r} is not known (one of: {', '.join(PrecisionType.list())})"
        )
    if not 0 <= node_rank < num_nodes:
        raise RuntimeMisuse(f"node_rank={node_rank} must be from 0 to num_nodes - 1 = {num_nodes - 1}")
    count = (torch.cuda.device_count() or 1) if num_processes is None else num_processes
    if count < 1:
        raise RuntimeMisuse(f"num_processes={count} must be at least 1")
    with patch_environment(accelerate_mixed_precision=mixed_precision.lower()):
        if count * num_nodes == 1:
            print("hpcaccel: training in this process", file=sys.stderr)
            function(*args)
            return
        _refuse_group("notebook_launcher")
        _refuse_used_gpu()
        check_os_kernel()
        print(f"hpcaccel: training in {count} processes on this node, of {num_nodes}", file=sys.stderr)
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
            said = _callstack(failure.error_file_data) or failure.message
            raise RunFailed(f"rank {rank} failed:\n{_from_function(said)}") from None


def _callstack(error_file: Mapping[str, Any] | None) -> str:
    """The traceback in what torch's ``record`` has written."""
    said = (error_file or {}).get("message") or ""
    return str(said.get("extraInfo", {}).get("py_callstack") or said) if isinstance(said, Mapping) else str(said)


def _run_as_rank(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """In the rank: call the function, and end what it has begun, for a forked process has no end of its own."""
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    function(*args)
    from hpcaccel.runtime.training_session import Session

    session, world = Session.existing(), World.existing()
    if session is not None:
        session.end()
    elif world is not None:
        world.destroy()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        # A session has taken them to stop at a step; there are no more steps, and whoever waits here may be ended.
        signal.signal(number, signal.SIG_DFL)


_CALL = "function(*args)"


def _refuse_group(what: str) -> None:
    if World.existing() is not None or dist.is_initialized():
        raise RuntimeMisuse(
            f"{what}() in a process that has an Accelerator or a PartialState already: make them inside of the "
            "function only. Restart the notebook's kernel, or call end_training() or destroy_process_group() first"
        )


def _refuse_used_gpu() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeMisuse(
            "this process has used a GPU already, which the ranks that it starts could not use then. Restart the "
            "notebook's kernel, and keep whatever touches a GPU (tensor.cuda(), torch.cuda.*) inside of the function"
        )


@contextmanager
def _without_launchers() -> Iterator[None]:
    """The ranks are started here, whatever job this process runs in."""
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
    """Newer Pythons warn of every fork of a process with threads, of which torch always has some."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        yield
