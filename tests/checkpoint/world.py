"""Real ranks for tests: processes with a gloo group, forked from a server that has already imported torch."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

from tests.runtime.template import WHAT_RANKS_IMPORT

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.checkpoint.training", *WHAT_RANKS_IMPORT])

TIMEOUT_SECONDS = 90
SECONDS_PER_RANK = 6
"""At least so long for each rank: many of them take turns on the cores."""


class Killed(Exception):
    """A rank ended without a result (exit code in ``args``) or hung and was killed."""


def run_ranks(function, *args, world_size=2):
    """Call ``function(rank, *args)`` in ``world_size`` processes with a default process group; return their results.

    If a rank raised, this raises. The result of a killed rank is ``Killed``; the other ranks then have five seconds to
    end, and their result may be the text of an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_main, args=(there, function, rank, world_size, folder, args))
            process.start()
            there.close()
            ranks.append((process, here))
        return _collect(ranks)


def _collect(ranks):
    deadline = time.monotonic() + max(TIMEOUT_SECONDS, SECONDS_PER_RANK * len(ranks))
    results = []
    for process, pipe in ranks:
        result = _result(process, pipe, deadline)
        if isinstance(result, Killed):
            deadline = min(deadline, time.monotonic() + 5)
        results.append(result)
    for process, _ in ranks:
        process.join(10)
        process.kill()
        process.join()
    if not any(isinstance(result, Killed) for result in results):
        for result in results:
            assert not isinstance(result, str), result
    return [result[0] if isinstance(result, tuple) else result for result in results]


def _result(process, pipe, deadline):
    """The rank's value in a tuple, or the text of its error. ``Killed`` if it sent neither in time."""
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        process.kill()
        return Killed("hangs")
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        return Killed(process.exitcode)


def _main(pipe: Connection, function, rank, world_size, folder, args):
    import torch
    import torch.distributed as dist

    from hpcaccel.runtime.distributed.wide_groups import connect_on_demand

    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    connect_on_demand(world_size)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    timeout = timedelta(seconds=max(60, SECONDS_PER_RANK * world_size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        result = (function(rank, *args),)
    except BaseException:
        result = f"rank {rank}:\n{traceback.format_exc()}"
    pipe.send_bytes(pickle.dumps(result))  # tensors by value: this process may have ended when the result is read
    pipe.close()
    if not isinstance(result, str):
        dist.barrier()
    dist.destroy_process_group()
