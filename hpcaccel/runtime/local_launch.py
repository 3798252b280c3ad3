"""Start ranks from within a program, such as a notebook or a test. Processes are forked, so the function may be defined
in a notebook cell or be a closure, and modules are not imported again.

Two things do not survive a fork: the GPU context and the threads of OpenMP. So ``notebook_launcher`` refuses to run in
a process that has used a GPU, and each rank computes with one thread by default.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hpcaccel.errors import RunFailed, RuntimeMisuse
from hpcaccel.runtime.compat.availability import check_os_kernel, is_port_in_use
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.enums import PrecisionType
from hpcaccel.runtime.forked_ranks import elastic_ranks, forked_ranks, function_traceback, run_as_rank
from hpcaccel.runtime.launch_env import patch_environment
from hpcaccel.runtime.notebook_cells import cells_that_call, cells_that_use_a_gpu, place_in_cell
from hpcaccel.runtime.rank_output import RankOutput

__all__ = ["debug_launcher", "notebook_launcher"]

STORE_SECONDS = 300.0
"""Timeout of the store through which the ranks of ``debug_launcher`` connect."""
JOIN_SECONDS = 900.0
"""How long a node waits for the others, unless ``rdzv_conf`` has a ``timeout``: the same as torch."""
JOIN_LOOK_SECONDS = 0.5
LAST_PORT = 65535


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
    failure = ""
    with forked_ranks(num_processes) as output, patch_environment(**shared):
        try:
            start_processes(  # type: ignore[no-untyped-call]
                _be_rank, args=(function, tuple(args), output), nprocs=num_processes, start_method="fork"
            )
        except ProcessRaisedException as error:
            failure = f"rank {error.error_index} of {num_processes} failed:\n{function_traceback(str(error))}"
        except ProcessExitedException as error:
            failure = f"rank {error.error_index} of {num_processes} exited early: {error}"
    if failure:
        raise RunFailed(failure)


def _be_rank(rank: int, function: Callable[..., Any], args: tuple[Any, ...], output: RankOutput | None) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    run_as_rank(function, args, output)


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
    """Call ``function(*args)`` in ranks on this node, started as by torchrun. With several nodes, call this on each.
    Interrupting the cell ends all ranks. A single rank runs in this process, and raises the function's own errors.

    Args:
        num_processes: number of ranks on this node. By default, one per GPU, or one if there is no GPU.
        mixed_precision: default precision of ``Accelerator()`` in the ranks.
        use_port, master_addr: port and address of the rendezvous. On a single node, port 0 means any free port.
        node_rank, num_nodes: this node's index, from 0, and the number of nodes.
        rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id, max_restarts, monitor_interval (seconds): as in torchrun.
        log_line_prefix_template: text before each line, with ``${role_name}``, ``${rank}`` and ``${local_rank}``.

    Raises:
        RunFailed: a rank failed (the message has the traceback of the first one), or a node has not joined in time.
        RuntimeMisuse: a wrong argument; or several ranks, and this process has used a GPU, an Accelerator or a group.

    Example::

        hpcaccel.notebook_launcher(train, args=(1e-3,), num_processes=2)
    """
    __tracebackhide__ = True  # from the error that a notebook shows
    count = _process_count(num_processes, node_rank=node_rank, num_nodes=num_nodes)
    _check_call(function, args, mixed_precision)
    with patch_environment(accelerate_mixed_precision=mixed_precision.lower()):
        if count * num_nodes == 1:
            print("hpcaccel: launching training in this process", file=sys.stderr)
            function(*args)
            return
        _launch(
            function,
            args,
            node_rank=node_rank,
            own_endpoint="" if rdzv_endpoint else f"{master_addr}:{_port(use_port)}",
            min_nodes=num_nodes,
            max_nodes=num_nodes,
            nproc_per_node=count,
            run_id=rdzv_id,
            rdzv_endpoint=rdzv_endpoint,
            rdzv_backend=rdzv_backend,
            rdzv_configs=dict(rdzv_conf or {}),
            max_restarts=max_restarts,
            monitor_interval=monitor_interval,
            log_line_prefix_template=log_line_prefix_template,
        )


def _launch(
    function: Callable[..., Any], args: Sequence[Any], *, node_rank: int, own_endpoint: str, **options: Any
) -> None:
    """Check that this process may fork ranks, wait for the other nodes, and start the ranks.

    Args:
        own_endpoint: address and port of a rendezvous without ``rdzv_endpoint``.
        options: of ``elastic_ranks``.
    """
    __tracebackhide__ = True  # from the error that a notebook shows
    _refuse_group("notebook_launcher")
    _refuse_used_gpu()
    count, nodes, is_static = options["nproc_per_node"], options["max_nodes"], options["rdzv_backend"] == "static"
    port = int(own_endpoint.rpartition(":")[2] or 0)
    if nodes == 1 and port and is_port_in_use(port):
        raise RuntimeMisuse(
            f"use_port={port} is in use by another process on this machine, perhaps another notebook. Pass use_port=0 "
            "for any free port"
        )
    check_os_kernel()
    processes = "1 process" if count == 1 else f"{count} processes"
    print(f"hpcaccel: launching training in {processes} on node {node_rank + 1} of {nodes}", file=sys.stderr)
    options["rdzv_endpoint"] = options["rdzv_endpoint"] or own_endpoint
    if is_static:
        options["rdzv_configs"]["rank"] = node_rank
    if is_static and nodes == 1 and options["rdzv_endpoint"].endswith(":0"):
        options |= {"rdzv_backend": "c10d", "rdzv_configs": {}}
    joining = options["rdzv_configs"] if is_static else {}
    with _nodes_joined(options["rdzv_endpoint"], options["run_id"], joining, nodes):
        elastic_ranks(function, args, **options)


@contextmanager
def _nodes_joined(endpoint: str, run_id: str, settings: Mapping[str, Any], num_nodes: int) -> Iterator[None]:
    """Wait until notebook_launcher has been called on all nodes. Torch waits, too, but cannot be interrupted then.

    Args:
        settings: ``rank`` is this node's index; without it, the rendezvous has an order of its own, and this function
            does not wait. ``timeout`` is in seconds.

    Raises:
        RunFailed: a node has not joined in time.
    """
    host, _, port = endpoint.rpartition(":")
    if num_nodes == 1 or "rank" not in settings:
        yield
        return
    rank, seconds = settings["rank"], float(settings.get("timeout", JOIN_SECONDS))
    deadline = time.monotonic() + seconds

    def wait(joined: Callable[[], bool], missing: str) -> None:
        while not joined():
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"{missing} in {seconds:g} s: call notebook_launcher() with the same address, use_port and "
                    f"num_nodes={num_nodes} on every node, with its node_rank"
                )
            time.sleep(JOIN_LOOK_SECONDS)

    if rank != 0:
        wait(lambda: _accepts(host, int(port)), f"node 0 did not open {endpoint}")
    # Torch's agent shares the server of this store: it is in the same process, and both are "multi-tenant".
    stores = [dist.TCPStore(host, int(port), None, rank == 0, timedelta(seconds=seconds), False, True)]
    try:
        # Each node increments its counter while it waits, and waits for the others' to change: after an interrupt on
        # one node, the counters of that launch may still exist.
        counters = [f"hpcaccel/{run_id}/node {number}" for number in range(num_nodes)]
        before = [stores[0].add(counter, 0) for counter in counters]

        def joined(other: int) -> bool:
            stores[0].add(counters[rank], 1)
            return stores[0].add(counters[other], 0) > before[other]

        for other in range(num_nodes):
            wait(partial(joined, other), f"node {other} did not join")
        stores[0].add(counters[rank], 1)  # for a node that has read it only after the last time
        yield
    finally:
        stores.clear()  # closes the port, even if a notebook keeps the frames of an exception


def _accepts(host: str, port: int) -> bool:
    """Whether a program listens on this port."""
    try:
        socket.create_connection((host, port), timeout=JOIN_LOOK_SECONDS).close()
    except OSError:
        return False
    return True


def _process_count(num_processes: int | None, *, node_rank: int, num_nodes: int) -> int:
    """The number of ranks on this node.

    Raises:
        RuntimeMisuse: an argument is not allowed.
    """
    if not 0 <= node_rank < num_nodes:
        raise RuntimeMisuse(f"node_rank={node_rank} must be at least 0 and less than num_nodes={num_nodes}")
    count = (torch.cuda.device_count() or torch.xpu.device_count() or 1) if num_processes is None else num_processes
    if not isinstance(count, int) or count < 1:
        raise RuntimeMisuse(f"num_processes={count!r} must be an integer, at least 1")
    return count


def _check_call(function: object, args: object, mixed_precision: object) -> None:
    """Raise RuntimeMisuse if an argument is not allowed."""
    if not callable(function):
        raise RuntimeMisuse(f"the first argument must be a function, not {function!r}: pass train, not train()")
    if not isinstance(args, list | tuple):
        raise RuntimeMisuse(f"args={args!r} must be a tuple with the function's arguments, such as args=({args!r},)")
    if not isinstance(mixed_precision, str) or mixed_precision.lower() not in PrecisionType:
        raise RuntimeMisuse(
            f"mixed_precision={mixed_precision!r} is not a valid value (allowed: {', '.join(PrecisionType.list())})"
        )


def _port(value: str | int) -> int:
    """``use_port`` as a number. Raises RuntimeMisuse if it is not a port."""
    if not str(value).isdecimal() or int(value) > LAST_PORT:
        raise RuntimeMisuse(f"use_port={value!r} must be an integer from 0 to {LAST_PORT}; 0 means any free port")
    return int(value)


def _refuse_group(what: str) -> None:
    """Raise RuntimeMisuse if this process has an Accelerator, a PartialState or a process group."""
    world = World.existing()
    if world is None and not dist.is_initialized():
        return
    where = ""
    if world is not None and (place := place_in_cell(world.created_by) or next(iter(world.created_by), None)):
        where = f", created in {place}"
    elif world is None and (cells := cells_that_call("init_process_group")):
        where = f", probably created in {cells}"
    raise RuntimeMisuse(
        f"{what}() was called in a process that already has an Accelerator, a PartialState or a process group"
        f"{where}: create them only inside the function. Restart the notebook's "
        "kernel, or call end_training() or destroy_process_group() first"
    )


def _refuse_used_gpu() -> None:
    """Raise RuntimeMisuse if this process has used a GPU."""
    if torch.cuda.is_initialized() or torch.xpu.is_initialized():  # type: ignore[no-untyped-call]
        where = f", probably in {cells}" if (cells := cells_that_use_a_gpu()) else ""
        raise RuntimeMisuse(
            f"this process has already used a GPU{where}, so the ranks that it forks could not use any GPU. Restart "
            "the notebook's kernel, and keep all code that uses a GPU (tensor.cuda(), torch.cuda.*) inside the function"
        )
