"""Measure the load of a DDP checkpoint, of which all ranks read the same bytes, compared with the disk and DCP.

In each round, the slower rank's times count: of a direct read of all bytes, each rank its share, without a check (the
disk's limit); of hpcaccel's load, where the ranks share what they read; of the same load where each rank reads alone;
and of ``dcp.load``. Files are dropped from the page cache before. The median of the rounds counts. Exits with 1 if a
limit is exceeded.
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

WIDTH, LAYERS = 2048, 8
"""Each layer holds 4.2 million parameters, with AdamW 50 MB."""
OF_THE_DISK, OF_DCP = 1.25, 0.6
"""Limits of a shared load, as multiples of the disk's limit and of ``dcp.load``."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    if options.rank is not None:
        _rank(options)
        return 0
    with tempfile.TemporaryDirectory(dir=options.directory or Path.cwd(), prefix="bench-") as folder:
        arguments = ["--rounds", str(options.rounds), "--ranks", str(options.ranks), "--directory", folder]
        measured = run_ranks(__file__, arguments, ranks=options.ranks)
    return _report(options, measured)


def _report(options: argparse.Namespace, found: dict[str, float]) -> int:
    limit = found["limit"]
    print(f"{found.pop('bytes') / 1e9:.3f} GB on {options.ranks} ranks, medians of {options.rounds} rounds")
    for name, seconds in found.items():
        print(f"  {name:24}{seconds:8.3f} s {seconds / limit:7.2f} of the limit")
    shared = found["shared"]
    ratios = {"limit": (shared / limit, OF_THE_DISK), "dcp.load": (shared / found["dcp.load"], OF_DCP)}
    for name, (value, most) in ratios.items():
        print(f"  shared / {name:15}{value:8.2f} of {most:.2f}   {'holds' if value <= most else 'FAILS'}")
    return 0 if all(value <= most for value, most in ratios.values()) else 1


def _rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{options.port}"
    dist.init_process_group("gloo", init_method=address, rank=options.rank, world_size=options.ranks)
    found = Bench(options.directory, options.rank, options.ranks).run(options.rounds)
    if options.rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


class Bench:
    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        import torch
        from torch import nn
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import save

        from hpcaccel.checkpoint import CheckpointEngine, TrainingState
        from hpcaccel.checkpoint.huge_pages import huge_pages

        self.rank = rank
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        self.state = TrainingState([model], [optimizer])
        self.engine = CheckpointEngine(directory / "ours", rank=rank, world_size=ranks)
        self.path = self.engine.save(self.state, step=1)
        weights, moments = get_state_dict(model, optimizer)
        self.theirs = {"model": weights, "optimizer": moments}
        self.their_path = directory / "dcp"
        save(self.theirs, checkpoint_id=self.their_path)
        sizes = {path: path.stat().st_size for path in sorted(self.path.glob("rank_*.bin"))}
        self.bytes = sum(sizes.values())
        whole, size = max(sizes.items(), key=lambda item: item[1])
        share = min(self.bytes // ranks, size) // 4096 * 4096
        self.part = (whole, min(rank * share, size - share) // 4096 * 4096)
        self.memory = huge_pages(share)
        self.figures: dict[str, list[float]] = defaultdict(list)

    def run(self, rounds: int) -> dict[str, float]:
        from hpcaccel.checkpoint import node_sharing

        least = node_sharing.LEAST_BYTES

        def load(bytes_to_share: int) -> None:
            node_sharing.LEAST_BYTES = bytes_to_share
            self.engine.load(self.path, self.state, fall_back=False)

        ways: list[tuple[str, Callable[[], Any]]] = [
            ("limit", self._limit),
            ("shared", lambda: load(least)),
            ("each rank alone", lambda: load(1 << 62)),
            ("dcp.load", self._dcp),
        ]
        for number in range(rounds + 1):
            if number == 1:
                self.figures.clear()  # the first round touches memory that later ones use again
            for name, way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                self._timed(name, way)
        return {"bytes": self.bytes, **{name: statistics.median(self.figures[name]) for name, _ in ways}}

    def _limit(self) -> None:
        path, begin = self.part
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        done = 0
        while done < len(self.memory):
            done += os.preadv(descriptor, [self.memory[done:]], begin + done)
        os.close(descriptor)

    def _dcp(self) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        load(self.theirs, checkpoint_id=self.their_path)

    def _timed(self, name: str, way: Callable[[], Any]) -> None:
        import torch
        import torch.distributed as dist

        dist.barrier()
        for path in (*self.path.iterdir(), *self.their_path.iterdir()) if self.rank == 0 else ():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        dist.barrier()
        begin = time.perf_counter()
        way()
        value = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        self.figures[name].append(value.item())


if __name__ == "__main__":
    sys.exit(main())
