"""Loaders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from hpcaccel import DataLoaderConfiguration, PermutationSampler, skip_first_batches

from . import Numbers, anew, linear, lists, numbers, refused, row, same, start


def flat(accelerator: Any, loader: Any) -> list[int]:
    """The samples of all ranks, in the order of the rounds."""
    rounds = [accelerator.gather(batch) for batch in loader]
    return [int(value) for batch in rounds for value in batch]


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.reads = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for value in range(self.count):
            self.reads += 1
            yield torch.tensor(float(value))


@row("sharding")
def sharding(folder: Path) -> None:
    accelerator = start()
    size, rank = accelerator.num_processes, accelerator.process_index
    count = 6 * size
    loader = accelerator.prepare(numbers(count, 2))
    same(len(loader), 3)
    same(loader.total_batch_size, 2 * size)
    assert isinstance(loader, DataLoader)
    expected = [[2 * (turn * size + rank), 2 * (turn * size + rank) + 1] for turn in range(3)]
    same(lists(loader), expected)
    accelerator = anew(dataloader_config=DataLoaderConfiguration(split_batches=True))
    loader = accelerator.prepare(numbers(count, 2 * size))
    same((len(loader), loader.total_batch_size), (3, 2 * size))
    same(lists(loader), expected)
    if size > 1:
        with refused("split_batches", str(2 * size + 1), str(size)):
            list(accelerator.prepare(numbers(count, 2 * size + 1)))


@row("even_batches and drop_last")
def even(folder: Path) -> None:
    accelerator = start()
    size = accelerator.num_processes
    for count in (1, 3, 4 * size + 1, 6 * size - 1):
        accelerator = anew()
        total = -(-count // (2 * size)) * 2 * size if size > 1 else count  # a single rank needs no even batches
        loader = accelerator.prepare(numbers(count, 2))
        same(flat(accelerator, loader), [value % count for value in range(total)])
        accelerator = anew(even_batches=False)
        found = lists(accelerator.prepare(numbers(count, 2)))
        batches = [list(range(begin, min(begin + 2, count))) for begin in range(0, count, 2)]
        same(found, batches[accelerator.process_index :: size])
        accelerator = anew()
        loader = accelerator.prepare(numbers(count, 2, drop_last=True))
        same(flat(accelerator, loader), list(range(count // (2 * size) * 2 * size)))


@row("dispatch_batches")
def dispatch(folder: Path) -> None:
    accelerator = start()
    size, rank = accelerator.num_processes, accelerator.process_index
    data = Stream(6 * size)
    loader = accelerator.prepare(DataLoader(data, batch_size=2))  # the default for these
    same(lists(loader), [[2 * (t * size + rank), 2 * (t * size + rank) + 1] for t in range(3)])
    same(data.reads, 6 * size if rank == 0 else 0)
    accelerator = anew(dispatch_batches=True)
    mapped = Numbers(6 * size)
    loader = accelerator.prepare(DataLoader(mapped, batch_size=2))
    same(flat(accelerator, loader), list(range(6 * size)))
    same(mapped.reads, 6 * size if rank == 0 else 0)
    accelerator = anew(dispatch_batches=False)
    data = Stream(6 * size)
    same(flat(accelerator, accelerator.prepare(DataLoader(data, batch_size=2))), list(range(6 * size)))
    same(data.reads, 6 * size)
    accelerator = anew()
    uneven = accelerator.prepare(DataLoader(Stream(4 * size + 1), batch_size=2))
    found = [int(value) for batch in uneven for value in accelerator.gather_for_metrics(batch)]
    same(found, list(range(4 * size + 1)))


@row("rng_types")
def generators(folder: Path) -> None:
    accelerator = start(rng_types=["torch"])
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(numbers(4 * accelerator.num_processes, 2, shuffle=True))
    seen = flat(accelerator, loader)
    same(sorted(seen), list(range(4 * accelerator.num_processes)))
    first = accelerator.gather(torch.rand(1))
    assert (first == first[0]).all(), first
    accelerator = anew()
    size = accelerator.num_processes
    own = torch.Generator().manual_seed(5 + accelerator.process_index)
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(numbers(8 * size, 2, shuffle=True, generator=own))
    orders = [flat(accelerator, loader) for _ in range(2)]
    same([sorted(order) for order in orders], [list(range(8 * size))] * 2)
    assert orders[0] != orders[1]
    raw = torch.Generator().manual_seed(5)  # the seed of rank 0
    same(orders[0], [int(v) for batch in numbers(8 * size, 2, shuffle=True, generator=raw) for v in batch])
    if size > 1:
        noise = accelerator.gather(torch.rand(1))
        assert len(set(noise.tolist())) > 1, "augmentations must differ by rank unless torch is asked for"


@row("skip_first_batches")
def skip(folder: Path) -> None:
    accelerator = start()
    size = accelerator.num_processes
    data = Numbers(8 * size)
    loader = accelerator.prepare(DataLoader(data, batch_size=2))
    rest = accelerator.skip_first_batches(loader, 3)
    assert isinstance(rest, DataLoader)
    same(len(rest), 1)
    before = data.reads
    same(lists(rest), lists(loader)[3:])
    same(data.reads - before, 2 + 8)
    same(len(lists(loader)), 4)
    same(lists(skip_first_batches(numbers(6, 2), 2)), [[4, 5]])
    stream = accelerator.prepare(DataLoader(Stream(8 * size), batch_size=2))
    same(flat(accelerator, accelerator.skip_first_batches(stream, 3)), list(range(6 * size, 8 * size)))


@row("rank-0-only evaluation")
def rank_zero(folder: Path) -> None:
    accelerator = start()
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    model, loader, shuffled = accelerator.prepare(
        model, numbers(4 * accelerator.num_processes, 2), numbers(4 * accelerator.num_processes, 2, shuffle=True)
    )
    for batch in loader:
        accelerator.backward(model(batch[:, None]).sum())
    if accelerator.is_main_process:
        model.eval()
        with torch.no_grad():
            seen = sum(len(model(batch[:, None])) for batch in shuffled)
        same(seen, 4)
    accelerator.wait_for_everyone()


@row("break, and abandoned loops")
def left(folder: Path) -> None:
    accelerator = start(gradient_accumulation_steps=2)
    size = accelerator.num_processes
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, training, evaluation = accelerator.prepare(
        model, optimizer, numbers(6 * size, 2, shuffle=True), numbers(4 * size, 2)
    )
    flags = []
    for batch in training:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[:, None]).mean())
            flags.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
        for _ in evaluation:
            break
    same(flags, [False, True, True])
    orders = []
    for _ in range(3):
        for batch in training:
            orders.append(accelerator.gather(batch).tolist())
            break
    assert len({tuple(order) for order in orders}) > 1 or size > 1, "three epochs in the same order"


@row("PermutationSampler")
def permutation(folder: Path) -> None:
    accelerator = start()
    size = accelerator.num_processes
    data = Numbers(10 * size)
    loader = accelerator.prepare(DataLoader(data, batch_size=2, sampler=PermutationSampler(data, seed=3)))
    orders = [flat(accelerator, loader) for _ in range(2)]
    same([sorted(order) for order in orders], [list(range(10 * size))] * 2)
    assert orders[0] != orders[1]
    assert orders[0] != list(range(10 * size))
