"""Measurements of collectives along trees, with processes as ranks, which are forked once torch is imported.

``python tree_costs.py KIND RANKS WIDTH`` prints figures as JSON. KIND is ``reduce`` (the stop agreement: one number),
``gather`` (a call of the script: 256 bytes of each rank) or ``agree`` (a save's agreement, along a binomial tree).
Seconds are the fastest of many turns on the slowest rank. A width of RANKS is gloo's ring of all ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["agreement", "main", "seconds"]

TURNS = 40
LIMIT = timedelta(seconds=120)
ROW_WORDS = 32
"""8-byte words of a call's message, see ``exchange.MESSAGE_WORDS``."""
ROOT = Path(__file__).parents[2]


def seconds(kind: str, ranks: int, width: int) -> float:
    """Seconds of a reduction or an all-gather by ``ranks`` processes along a tree of groups of ``width`` ranks."""
    return float(_run(kind, ranks, width)["seconds"])


def agreement(ranks: int) -> dict[str, float]:
    """Seconds of an agreement in a save, and what rank 0 receives: messages, and their bytes."""
    return _run("agree", ranks, ranks)


def _run(kind: str, ranks: int, width: int) -> dict[str, float]:
    said = subprocess.run(
        [sys.executable, __file__, kind, str(ranks), str(width)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_GLOO_LAZY_INIT": "1", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout
    found: dict[str, float] = json.loads(said)
    return found


def main() -> None:
    kind, ranks, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    import torch.distributed as dist  # before the fork

    from hpcaccel.checkpoint import rank_agreement  # noqa: F401
    from hpcaccel.runtime.distributed import wide_groups  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        for rank in range(ranks):
            reader, writer = os.pipe()
            if not os.fork():
                store: Any = dist.FileStore(str(Path(folder) / "store"), ranks)
                turn, counted = {"reduce": _reduction, "gather": _gather, "agree": _agreement}[kind](
                    store, rank, ranks, width
                )
                taken = _turns(turn)
                with os.fdopen(writer, "w") as pipe:
                    json.dump([taken, counted], pipe)
                os._exit(0)
            os.close(writer)
            pipes.append(reader)
        found = []
        for reader in pipes:
            with os.fdopen(reader) as pipe:
                found.append(json.load(pipe))
    fastest = min(max(taken[turn] for taken, _ in found) for turn in range(TURNS))
    first = {name: total / (TURNS + 5) for name, total in found[0][1].items()}
    print(json.dumps({"seconds": fastest, **first}))


def _turns(turn: Callable[[], object]) -> list[float]:
    taken = []
    for _ in range(TURNS + 5):  # the first turns connect the ranks
        started = time.perf_counter()
        turn()
        taken.append(time.perf_counter() - started)
    return taken[5:]


def _reduction(store: Any, rank: int, ranks: int, width: int) -> tuple[Callable[[], object], dict[str, int]]:
    import torch
    import torch.distributed as dist

    from hpcaccel.runtime.distributed.wide_groups import RankTree

    tree = RankTree(store, rank, ranks, timeout=LIMIT, width=width)
    return lambda: tree.reduce(torch.zeros(1, dtype=torch.int64), dist.ReduceOp.BOR).wait(), {}


def _gather(store: Any, rank: int, ranks: int, width: int) -> tuple[Callable[[], object], dict[str, int]]:
    import torch

    from hpcaccel.runtime.distributed.wide_groups import RankTree

    tree = RankTree(store, rank, ranks, timeout=LIMIT, width=width)
    table = torch.zeros(tree.rows, ROW_WORDS, dtype=torch.int64)
    return lambda: tree.gather(table).wait(), {}


def _agreement(store: Any, rank: int, ranks: int, width: int) -> tuple[Callable[[], object], dict[str, int]]:
    import pickle

    import torch.distributed as dist

    from hpcaccel.checkpoint import object_tree
    from hpcaccel.checkpoint.rank_agreement import CheckpointRanks

    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=LIMIT)
    counted = {"messages": 0, "bytes": 0}
    module: Any = object_tree
    receive = module._receive

    def counting(*words: Any) -> Any:
        value = receive(*words)
        counted["messages"] += 1
        counted["bytes"] += len(pickle.dumps(value))
        return value

    module._receive = counting
    together = CheckpointRanks(rank=rank, world_size=ranks)
    return lambda: together.reduce("a save", lambda: True, all), counted


if __name__ == "__main__":
    main()
