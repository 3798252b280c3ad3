"""Write ``golden.json``: which samples Accelerate gives each rank. Made with accelerate 1.15.0 and torch 2.13.0.

    python tests/data/sharding/make_golden.py

A case's key is ``n/batch_size/P/split/even/drop_last``; its value is a list of batches for each rank. Batches of
samplers that say no ``batch_size`` are under ``unsized``, with ``even/drop_last`` of the same raw batches. Streams have
neither ``even`` (they are always filled up) nor batches: the DataLoader makes those.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

SAMPLES = (1, 2, 3, 5, 8, 9, 13, 16, 17, 24)
BATCH_SIZES = (1, 2, 4, 6)
RANKS = (2, 3, 4)
RAW = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]


class Unsized:
    """A batch sampler without ``batch_size``."""

    def __init__(self, batches: list[list[int]], drop_last: bool) -> None:
        self.batches = batches
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Stream(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


def key(*parts: Any) -> str:
    return "/".join(str(int(part)) for part in parts)


def ranks(make: Any, size: int) -> list[Any]:
    return [list(make(rank)) for rank in range(size)]


def main() -> None:
    sized, streams = {}, {}
    for samples, batch, size, split, even, drop in itertools.product(
        SAMPLES, BATCH_SIZES, RANKS, (False, True), (False, True), (False, True)
    ):
        if split and batch % size:
            continue
        sized[key(samples, batch, size, split, even, drop)] = ranks(
            lambda rank: BatchSamplerShard(
                BatchSampler(SequentialSampler(range(samples)), batch, drop), size, rank, split, even
            ),
            size,
        )
        if even:
            streams[key(samples, batch, size, split, drop)] = ranks(
                lambda rank: IterableDatasetShard(Stream(samples), batch, drop, size, rank, split), size
            )
    unsized = {
        key(size, even, drop): ranks(
            lambda rank: BatchSamplerShard(Unsized(RAW, drop), size, rank, even_batches=even), size
        )
        for size, even, drop in itertools.product(RANKS, (False, True), (False, True))
    }
    golden = {"raw": RAW, "sized": sized, "unsized": unsized, "streams": streams}
    path = Path(__file__).with_name("golden.json")
    lines = ",\n".join(
        f'"{kind}": {{\n'
        + ",\n".join(f'"{name}": {json.dumps(value, separators=(",", ":"))}' for name, value in cases.items())
        + "\n}"
        for kind, cases in golden.items()
        if isinstance(cases, dict)
    )
    path.write_text(f'{{\n"raw": {json.dumps(RAW)},\n{lines}\n}}\n')


if __name__ == "__main__":
    main()
