"""Collective operations."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader

import hpcaccel
from hpcaccel import broadcast_object_list, gather_object, set_seed
from hpcaccel.utils import broadcast, pad_across_processes, reduce

from . import Numbers, anew, numbers, refused, row, same, start


@row("gather")
def gather(folder: Path) -> None:
    accelerator = start()
    size, rank = accelerator.num_processes, accelerator.process_index
    same(accelerator.gather(torch.tensor(float(rank))).tolist(), [float(r) for r in range(size)])
    nested = {"a": torch.full((2, 3), rank), "b": [torch.tensor([rank]), (torch.tensor([True]),)]}
    found = accelerator.gather(nested)
    same(found["a"].tolist(), [[r] * 3 for r in range(size) for _ in range(2)])
    same(found["b"][0].tolist(), list(range(size)))
    same((type(found["b"][1]), found["b"][1][0].tolist()), (tuple, [True] * size))
    same(accelerator.gather(torch.arange(6).reshape(2, 3).t()).shape, torch.Size([3 * size, 2]))
    same(gather_object([{"rank": rank}]), [{"rank": r} for r in range(size)])


@row("gather_for_metrics")
def metrics(folder: Path) -> None:
    accelerator = start()
    size = accelerator.num_processes
    for count in (4 * size + 1, 7, 1):
        loader = accelerator.prepare(numbers(count, 2))
        found, words, statistic = [], [], []
        for batch in loader:
            one, two = accelerator.gather_for_metrics((batch, batch * 2))
            same((one * 2).tolist(), two.tolist())
            found += one.tolist()
            words += accelerator.gather_for_metrics([f"{int(value)}" for value in batch], use_gather_object=True)
            statistic.append(len(accelerator.gather_for_metrics(torch.zeros(7))))
        same(found, [float(value) for value in range(count)])
        same(words, [str(value) for value in range(count)])
        same(set(statistic), {7 * size})
    seven = accelerator.prepare(DataLoader(Numbers(7), batch_size=4))
    same(sum(len(accelerator.gather_for_metrics(batch)) for batch in seven), 7)
    same(accelerator.gather_for_metrics(torch.zeros(3)).shape, torch.Size([3 * size]))


@row("pad_across_processes")
def pad(folder: Path) -> None:
    accelerator = start()
    size, rank = accelerator.num_processes, accelerator.process_index
    tensor = torch.full((rank + 1, 2), rank + 1)
    padded = accelerator.pad_across_processes({"x": [tensor]}, pad_index=-1)["x"][0]
    same(padded.shape, torch.Size([size, 2]))
    same(padded[: rank + 1].tolist(), tensor.tolist())
    assert (padded[rank + 1 :] == -1).all()
    front = pad_across_processes(torch.ones(1, rank + 1), dim=1, pad_first=True)
    same(front.tolist(), [[0.0] * (size - rank - 1) + [1.0] * (rank + 1)])
    same(accelerator.gather(padded).shape, torch.Size([size * size, 2]))


@row("reduce, gather_object, broadcast_object_list")
def others(folder: Path) -> None:
    accelerator = start()
    size, rank = accelerator.num_processes, accelerator.process_index
    total = sum(range(size))
    same(accelerator.reduce({"a": torch.tensor([float(rank)])})["a"].tolist(), [float(total)])
    same(accelerator.reduce(torch.tensor([float(rank)]), "mean").tolist(), [total / size])
    same(reduce(torch.tensor([float(rank)]), reduction="sum", scale=2.0).tolist(), [2.0 * total])
    box = [rank, f"of {rank}"]
    given = broadcast_object_list(box, from_process=size - 1)
    same((box, given), ([size - 1, f"of {size - 1}"],) * 2)
    same(broadcast(torch.tensor([rank]), from_process=0).tolist(), [0])


@row("set_trigger and check_trigger")
def trigger(folder: Path) -> None:
    accelerator = start()
    same(accelerator.check_trigger(), False)
    if accelerator.is_last_process:
        accelerator.set_trigger()
    same(accelerator.check_trigger(), True)
    same(accelerator.check_trigger(), False)


@row("find_executable_batch_size")
def batch_size(folder: Path) -> None:
    from hpcaccel import find_executable_batch_size

    accelerator = start()
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=20)
    def train(batch_size: int, word: str) -> tuple[int, str]:
        tried.append(batch_size)
        # Only the last rank runs out of memory.
        if accelerator.is_last_process and batch_size > 17:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a test")
        return batch_size, word

    size, word = train("word")
    same(word, "word")
    assert size <= 17, tried
    sizes = accelerator.gather(torch.tensor([size]))
    assert (sizes == size).all(), sizes

    @find_executable_batch_size(starting_batch_size=1)
    def never(batch_size: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a test")

    with refused("batch size"):
        never()

    def wrong(batch_size: int) -> None:
        raise ValueError("something else")

    with refused("something else", kind=ValueError):
        find_executable_batch_size(wrong, starting_batch_size=4)()


@row("debug mode")
def debug(folder: Path) -> None:
    accelerator = start(debug=True)
    size, rank = accelerator.num_processes, accelerator.process_index
    same(accelerator.gather(torch.ones(1)).tolist(), [1.0] * size)
    if size > 1:
        with refused(*(str(r + 1) for r in range(size)), "together.py"):
            accelerator.gather(torch.ones(rank + 1))
        with refused("together.py"):
            accelerator.reduce(torch.ones(rank + 1))
    same(accelerator.gather(torch.ones(1)).tolist(), [1.0] * size)


@row("set_seed")
def seed(folder: Path) -> None:
    from hpcaccel.utils import synchronize_rng_states

    accelerator = start()
    set_seed(7)
    equal = accelerator.gather(torch.rand(1))
    assert (equal == equal[0]).all(), equal
    set_seed(7, device_specific=True)
    differ = accelerator.gather(torch.rand(1))
    same(len(set(differ.tolist())), accelerator.num_processes)
    set_seed(7 + accelerator.process_index)
    synchronize_rng_states(["torch"])
    again = accelerator.gather(torch.rand(1))
    assert (again == again[0]).all(), again
    torch.manual_seed(7)
    same(float(again[0]), float(torch.rand(1)))


@row("free_memory")
def free(folder: Path) -> None:
    accelerator = start()
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), numbers(4, 2))
    model, loader = accelerator.free_memory(model, loader)
    same((model, loader), (None, None))
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    assert list(accelerator.clear(model)) == [None]
    assert hpcaccel.Accelerator is type(accelerator)
    anew()
