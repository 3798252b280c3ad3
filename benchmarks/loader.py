"""Measure the time that a prepared DataLoader adds per batch, hpcaccel's and Accelerate's, in turns; medians.

    python benchmarks/loader.py

One process, no workers, the CPU. Exits with 1 if hpcaccel's adds more than Accelerate's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

TURNS = 31
BATCHES = 400
BATCH = 32


class Ready:
    """A dataset with the least possible overhead."""

    def __init__(self) -> None:
        self.samples = torch.zeros(BATCH * BATCHES)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def first(samples: list[int]) -> int:
    return samples[0]


def main() -> int:
    try:
        import accelerate
    except ImportError:
        print("accelerate is not installed. Install it with: pip install 'hpcaccel[bench]'")
        return 1
    from hpcaccel import Accelerator

    passed = True
    print(f"torch {torch.__version__}, accelerate {accelerate.__version__}, medians of {TURNS} turns, µs per batch\n")
    print(f"{'':24}{'plain':>8}{'hpcaccel':>12}{'accelerate':>13}")
    ours, peers = Accelerator(cpu=True), accelerate.Accelerator(cpu=True)
    for name, options in {"in order": {}, "shuffled": {"shuffle": True}}.items():
        loaders: dict[str, Any] = {
            "plain": _make(options),
            "ours": ours.prepare(_make(options)),
            "peer": peers.prepare(_make(options)),
        }
        seconds: dict[str, list[float]] = {key: [] for key in loaders}
        for turn in range(TURNS + 1):
            for key, loader in loaders.items():
                took = _epoch(iter(loader))
                if turn:
                    seconds[key].append(took)
        plain = statistics.median(seconds["plain"])
        added = {
            key: statistics.median(one - other for one, other in zip(seconds[key], seconds["plain"], strict=True))
            for key in ("ours", "peer")
        }
        within = added["ours"] <= added["peer"]
        passed = passed and within
        print(
            f"{name:24}{plain * 1e6:8.1f}{added['ours'] * 1e6:+12.2f}{added['peer'] * 1e6:+13.2f}"
            f"{'' if within else '  too much'}"
        )
    ours.end_training()
    return 0 if passed else 1


def _make(options: dict[str, Any]) -> DataLoader[Any]:
    data: Any = Ready()
    return DataLoader(data, batch_size=BATCH, collate_fn=first, **options)


def _epoch(batches: Iterator[Any]) -> float:
    next(batches)
    begin = time.perf_counter()
    for _ in batches:
        pass
    return (time.perf_counter() - begin) / (BATCHES - 1)


if __name__ == "__main__":
    sys.exit(main())
