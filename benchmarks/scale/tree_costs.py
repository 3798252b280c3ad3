"""Measurement of the stop agreement's tree with processes as ranks, which are forked once torch is imported.

``python tree_costs.py RANKS WIDTH`` prints the seconds of an all-reduce of one number: the fastest of many turns on the
slowest rank. A width of RANKS is gloo's ring of all ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

__all__ = ["main", "reduction_seconds"]

TURNS = 100
ROOT = Path(__file__).parents[2]


def reduction_seconds(ranks: int, width: int) -> float:
    """Seconds of a reduction by ``ranks`` processes along a tree of groups of ``width`` ranks."""
    said = subprocess.run(
        [sys.executable, __file__, str(ranks), str(width)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_GLOO_LAZY_INIT": "1", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    ).stdout
    return float(said)


def main() -> None:
    import torch.distributed as dist

    from hpcaccel.runtime.distributed.wide_groups import RankTree

    ranks, width = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        for rank in range(ranks):
            reader, writer = os.pipe()
            if not os.fork():
                store: Any = dist.FileStore(str(Path(folder) / "store"), ranks)
                tree = RankTree(store, rank, ranks, timeout=timedelta(seconds=120), width=width)
                with os.fdopen(writer, "w") as pipe:
                    json.dump(_turns(tree), pipe)
                os._exit(0)
            os.close(writer)
            pipes.append(reader)
        taken = []
        for reader in pipes:
            with os.fdopen(reader) as pipe:
                taken.append(json.load(pipe))
    print(min(max(one[turn] for one in taken) for turn in range(TURNS)))


def _turns(tree: Any) -> list[float]:
    import torch
    import torch.distributed as dist

    taken = []
    for _ in range(TURNS + 5):  # the first turns connect the ranks
        value = torch.zeros(1, dtype=torch.int64)
        started = time.perf_counter()
        tree.reduce(value, dist.ReduceOp.BOR).wait()
        taken.append(time.perf_counter() - started)
    return taken[5:]


if __name__ == "__main__":
    main()
