"""Measure the cost of snapshots in memory, compared with a copy in memory, and a load from them with one from the disk.

Two ranks hold an FSDP2 model with AdamW. In each round, the slower rank's times count: of a copy of the same bytes into
warm memory; of a snapshot, for which training waits; until the snapshot is complete; and of loads from memory and from
a checkpoint that is not in the page cache. The median of the rounds counts. Exits with 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from side_by_side import run_ranks

RANKS = 2
WIDTH = 4096
LAYERS = {"0.6 GB": 3, "1.2 GB": 6}
STALL, LOAD = 1.2, 1.0
"""Limits: of a snapshot's stall as a multiple of the copy, of a load from memory as a multiple of one from the disk."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", choices=LAYERS, action="append")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    if options.rank is not None:
        _rank(options)
        return 0
    print(f"{'':8} {'copy':>8} {'stall':>8} {'complete':>9} {'memory':>8} {'disk':>8}   stall/copy  memory/disk")
    return 0 if not [size for size in options.size or LAYERS if not _measure(size, options.rounds)] else 1


def _measure(size: str, rounds: int) -> bool:
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix="bench-") as folder:
        times = run_ranks(__file__, ["--rounds", str(rounds), "--size", size, "--directory", folder], ranks=RANKS)
    copy, stall, complete, memory, disk = (times[name] for name in ("copy", "stall", "complete", "memory", "disk"))
    held: bool = stall <= STALL * copy and memory <= LOAD * disk
    print(
        f"{size:8} {copy:7.3f}s {stall:7.3f}s {complete:8.3f}s {memory:7.3f}s {disk:7.3f}s   "
        f"{stall / copy:10.2f}  {memory / disk:11.2f}   {'' if held else f'limits: {STALL}, {LOAD}'}",
        flush=True,
    )
    return held


def _rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=options.rank, world_size=RANKS)
    found = _times(options.directory, options.rank, LAYERS[options.size[0]], options.rounds)
    if options.rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _times(directory: Path, rank: int, layers: int, rounds: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from hpcaccel.checkpoint import CheckpointEngine, TrainingState, capture_rng
    from hpcaccel.checkpoint.dcp_storage import raw_bytes
    from hpcaccel.checkpoint.node_snapshots import NodeSnapshots
    from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
    from hpcaccel.checkpoint.snapshot_memory import SnapshotMemory
    from hpcaccel.checkpoint.snapshot_resume import SnapshotResume
    from hpcaccel.checkpoint_files import snapshot_folder

    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model(torch.randn(2, WIDTH)).square().mean().backward()
    optimizer.step()
    state = TrainingState([model], [optimizer], per_rank={"rng": capture_rng()})
    tensors = [getattr(item, "_local_tensor", item).detach() for item in model.parameters()]
    for item in optimizer.state.values():
        tensors += [getattr(item[name], "_local_tensor", item[name]) for name in ("exp_avg", "exp_avg_sq")]
    copy_of = SnapshotMemory(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
    lengths = [tensor.numel() * tensor.element_size() for tensor in tensors]
    ranks = CheckpointRanks(rank=rank, world_size=RANKS)
    folder = snapshot_folder.SnapshotFolder(directory, "node")
    snapshots = NodeSnapshots(ranks, folder, attempt=1, local_world_size=RANKS, is_local_main=rank == 0)
    resume = SnapshotResume(ranks, folder, is_local_main=rank == 0)
    engine = CheckpointEngine(directory / "checkpoints", rank=rank, world_size=RANKS)
    path = engine.save(state, step=1)
    facts: dict[str, Any] = {"epoch": 0, "reason": "", "guarantee": "state-exact", "guarantee_reasons": []}
    facts |= {"world_size": RANKS, "mesh": {}, "attempt": 1}
    found: defaultdict[str, list[float]] = defaultdict(list)

    def timed(name: str, work: Callable[[], object]) -> None:
        dist.barrier()
        begin = time.perf_counter()
        work()
        took = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        found[name].append(took.item())

    def load() -> None:
        newest = resume.find(committed=None)
        assert newest is not None
        resume.load(newest, state)

    try:
        for number in range(rounds + 3):  # the first rounds allocate memory
            timed("copy", lambda: copy_of.snapshot(tensors, lengths))
            timed("stall", lambda number=number: snapshots.take(state, {**facts, "step": number + 1}))  # type: ignore[misc]
            begin = time.perf_counter()
            snapshots.agree()
            found["complete"].append(found["stall"][-1] + time.perf_counter() - begin)
            timed("memory", load)
            for file in path.iterdir():
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            timed("disk", lambda: engine.load(path, state))
        assert len(raw_bytes(tensors[0])) == lengths[0]
    finally:
        snapshots.close()
        dist.barrier()
        snapshot_folder.remove(directory)
    return {name: statistics.median(seconds[3:]) for name, seconds in found.items()}


if __name__ == "__main__":
    sys.exit(main())
