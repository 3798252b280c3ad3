"""Exact counts of requests, messages, bytes and operations, with processes as ranks that run hpcaccel's code.

``python -m scale.process_counts KIND,… SIZE …`` counts in one program, whose processes are forked after the imports,
and prints a line of JSON for each kind. ``protocol_counts`` has the models of these counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from scale import message_counts, record_counts
from scale.forked_ranks import with_folder

__all__ = ["COUNTERS", "WITHOUT_TORCH", "Counts", "count"]

Counts = dict[str, float]
"""Values by name of the count."""
LIMIT = timedelta(seconds=120)
BENCHMARKS = Path(__file__).parents[1]
_used: list[Any] = []
"""Stores and groups of this process, which the other processes need until they end together."""


def count(
    kinds: Sequence[str], sizes: Sequence[int], progress: Callable[[str], None] = lambda kind: None
) -> dict[str, dict[int, float]]:
    """Run the counters ``kinds`` at each size, in a program of their own. Returns the counts by name and size.

    Args:
        progress: is called with each kind once it is counted.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": f"{BENCHMARKS}:{BENCHMARKS.parent}",
        "OMP_NUM_THREADS": "1",
        "HPCACCEL_PATIENCE_SECONDS": "600",
    }
    command = [sys.executable, "-m", "scale.process_counts", ",".join(kinds), *map(str, sizes)]
    found: dict[str, dict[int, float]] = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for kind, line in zip(kinds, program.stdout, strict=False):
            for size, counts in json.loads(line).items():
                for name, value in counts.items():
                    found.setdefault(name, {})[int(size)] = value
            progress(kind)
    if program.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed with exit code {program.returncode}")
    return found


# -- the store of rank 0


def check_in(ranks: int) -> Counts:
    """Requests at the store while all ranks check in, without the polls that rank 0 repeats while it waits."""
    from types import SimpleNamespace

    import torch.distributed as dist

    from hpcaccel.runtime.distributed import rendezvous
    from scale import store_costs

    def rank_counts(rank: int, folder: str) -> dict[str, int]:
        module: Any = rendezvous
        store = _tcp_store(rank, folder)
        module.dist = SimpleNamespace(PrefixStore=store_costs.CountedStore, DistError=dist.DistError)
        env: Any = SimpleNamespace(
            rank=rank, world_size=ranks, local_world_size=ranks, key="scale", master_addr="127.0.0.1"
        )
        shared = rendezvous._check_in(store, env, LIMIT)
        return dict(shared.requests)

    found = with_folder(ranks, rank_counts)
    own = [sum(one.values()) - one.get("poll", 0) for one in found]
    return {"check-in: requests of rank 0": own[0], "check-in: requests at the store": sum(own)}


def full_mesh(ranks: int) -> Counts:
    """Requests at the store for a gloo group whose ranks connect in advance."""
    return {"group, full mesh: requests at the store": _group_requests(ranks, lazy=False)}


def on_demand(ranks: int) -> Counts:
    """Requests at the store for a gloo group whose ranks connect on demand, and its first reduction."""
    return {"group, on demand: requests at the store": _group_requests(ranks, lazy=True)}


def _group_requests(ranks: int, *, lazy: bool) -> int:
    import torch
    import torch.distributed as dist

    from scale import store_costs

    os.environ["TORCH_GLOO_LAZY_INIT"] = str(int(lazy))

    def rank_count(rank: int, folder: str) -> int:
        store = _tcp_store(rank, folder)
        counting = store_costs.counting_store(store)
        group: Any = dist.ProcessGroupGloo(counting, rank, ranks, LIMIT)
        group.allreduce([torch.zeros(1, dtype=torch.int64)]).wait()
        _used.append(group)
        return int(sum(counting.requests.values()))

    return sum(with_folder(ranks, rank_count))


def _tcp_store(rank: int, folder: str) -> Any:
    import torch.distributed as dist

    ports = dist.FileStore(str(Path(folder) / "port"))
    ports.set_timeout(LIMIT)
    port = 0 if rank == 0 else int(ports.get("port"))
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, LIMIT, wait_for_workers=False)
    if rank == 0:
        ports.set("port", str(store.port))
    _used.append(store)
    return store


# -- saves


def save_agreement(ranks: int) -> Counts:
    """Messages that rank 0 receives, and messages one after the other, when the ranks tell rank 0 that their parts of
    the plan are unchanged; and the answers in rank 0's messages, of which equal ones of neighbours are one."""
    import torch.distributed as dist

    from hpcaccel.checkpoint import object_tree
    from hpcaccel.checkpoint.rank_agreement import CheckpointRanks

    module: Any = object_tree

    def rank_counts(rank: int, folder: str) -> list[int]:
        store = dist.FileStore(str(Path(folder) / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=LIMIT)
        received = depth = answers = 0
        send, receive = module._send, module._receive

        def send_counted(value: Any, to: int, group: Any) -> None:
            send((depth + 1, value), to, group)

        def receive_counted(sender: int, group: Any) -> Any:
            nonlocal received, depth, answers
            before, value = receive(sender, group)
            received, depth, answers = received + 1, max(depth, before), answers + len(value)
            return value

        module._send, module._receive = send_counted, receive_counted
        CheckpointRanks(rank=rank, world_size=ranks)._merged(lambda: True, lambda unchanged: all(unchanged))
        return [received, depth, answers]

    received, depth, answers = with_folder(ranks, rank_counts)[0]
    return {
        "save: messages to rank 0": received,
        "save: messages in turn": depth,
        "save: equal answers at rank 0": answers,
    }


def commit(ranks: int) -> Counts:
    """Operations on the file system, and entries of folders, of a background save."""
    from scale import commit_costs

    counted = commit_costs.operations(ranks)
    with tempfile.TemporaryDirectory() as folder:
        made = commit_costs.commit(ranks, folder=Path(folder))
    return {
        "commit: operations of a writer": counted["writer"],
        "commit: operations of rank 0": counted["first"],
        "commit: entries of the largest folder": made["entries"],
    }


COUNTERS: dict[str, Callable[[int], Counts]] = {
    "check_in": check_in,
    "full_mesh": full_mesh,
    "on_demand": on_demand,
    "agreement": partial(message_counts.agreement, shape="ring"),
    "tree_agreement": partial(message_counts.agreement, shape="tree"),
    "call": partial(message_counts.call, shape="ring"),
    "tree_call": partial(message_counts.call, shape="tree"),
    "save_agreement": save_agreement,
    "commit": commit,
    "sweep": record_counts.sweep,
    "runs": record_counts.runs,
}
"""By kind."""
WITHOUT_TORCH = {"commit", "runs"}


def main() -> None:
    kinds = sys.argv[1].split(",")
    if set(kinds) - WITHOUT_TORCH:
        import torch.distributed  # noqa: F401  (before the forks)
    for kind in kinds:
        print(json.dumps({size: COUNTERS[kind](int(size)) for size in sys.argv[2:]}), flush=True)


if __name__ == "__main__":
    main()
