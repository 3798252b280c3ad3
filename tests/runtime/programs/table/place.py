"""Rank numbers, and functions that run on some ranks only."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch

import hpcaccel
from hpcaccel import AcceleratorState, DistributedType, GradientState, PartialState

from . import anew, end_all, linear, numbers, refused, row, same, start


@row("Accelerator again in the same process")
def again(folder: Path) -> None:
    first = start(gradient_accumulation_steps=2)
    second = start()
    model = first.prepare(linear())
    assert second.unwrap_model(model) is first.unwrap_model(model)
    same(second.process_index, first.process_index)
    same(second.gradient_accumulation_steps, 1)
    second.gradient_accumulation_steps = 3
    same(first.gradient_accumulation_steps, 2)


@row("afresh after end_training and destroy_process_group")
def afresh(folder: Path) -> None:
    for turn in range(5):
        accelerator = start(gradient_accumulation_steps=turn + 1)
        same(accelerator.gradient_accumulation_steps, turn + 1)
        model, loader = accelerator.prepare(linear(), numbers(4 * accelerator.num_processes, 2))
        same(len(list(loader)), 2)
        total = accelerator.reduce(torch.ones(1))
        same(int(total), accelerator.num_processes)
        if turn % 3 == 0:
            accelerator.end_training()
        elif turn % 3 == 1:
            PartialState().destroy_process_group()
        else:
            AcceleratorState().destroy_process_group()
        accelerator.print(end="")
        assert type(accelerator.unwrap_model(model)) is torch.nn.Linear
    assert not torch.distributed.is_initialized()


@row("DDP then FSDP2 in one script")
def two_kinds(folder: Path) -> None:
    for strategy in ("ddp", "fsdp", "ddp"):
        accelerator = anew(strategy=strategy)
        model = torch.nn.Sequential(linear(), linear())
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        accelerator.backward(model(torch.ones(2, 1)).mean())
        optimizer.step()
        weights = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            same([float(weight) for weight in weights.values()], [0.5, 0.5])


@row("device, distributed_type, num_processes, process_index")
def who(folder: Path) -> None:
    accelerator = start()
    size, rank = accelerator.num_processes, accelerator.process_index
    everyone = accelerator.gather(torch.tensor([rank]))
    same(everyone.tolist(), list(range(size)))
    same(accelerator.device, torch.device("cpu"))
    same(accelerator.distributed_type, DistributedType.NO if size == 1 else DistributedType.MULTI_CPU)
    same(accelerator.use_distributed, size > 1)
    same(accelerator.is_main_process, rank == 0)
    same(accelerator.is_last_process, rank == size - 1)
    same(accelerator.is_local_main_process, accelerator.local_process_index == 0)
    mains = accelerator.gather(torch.tensor([int(accelerator.is_local_main_process)]))
    assert 1 <= int(mains.sum()) <= size
    for state in (PartialState(), AcceleratorState(), accelerator.state):
        same((state.num_processes, state.process_index), (size, rank))
        same((state.is_main_process, state.device), (rank == 0, accelerator.device))
    same(AcceleratorState().mixed_precision, "no")
    assert GradientState().sync_gradients is True


@row("PartialState without an Accelerator")
def alone(folder: Path) -> None:
    state = PartialState(cpu=True)
    same(state.initialized, True)
    found: list[int] = []
    with state.split_between_processes(list(range(5)), apply_padding=True) as part:
        found = state.gather_for_metrics([f"item {value}" for value in part])
    same(found, [f"item {value}" for value in range(5)])
    state.destroy_process_group()
    end_all()


@row("on_main_process, main_process_first, print")
def some(folder: Path) -> None:
    accelerator = start()
    size, rank = accelerator.num_processes, accelerator.process_index
    called: list[str] = []
    accelerator.on_main_process(lambda: called.append("main"))()
    accelerator.on_last_process(lambda: called.append("last"))()
    accelerator.on_local_main_process(lambda: called.append("local main"))()
    accelerator.on_process(lambda: called.append("first"), process_index=0)()

    @accelerator.on_process(process_index=size - 1)
    def by_number() -> None:
        called.append("number")

    by_number()
    same("main" in called, rank == 0)
    same("last" in called, rank == size - 1)
    same("number" in called, rank == size - 1)
    same("local main" in called, accelerator.is_local_main_process)
    mark = folder / "mark"
    with accelerator.main_process_first():
        same(mark.exists(), rank != 0)
        if rank == 0:
            mark.touch()
    with accelerator.local_main_process_first():
        pass
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        accelerator.print("hello")
    same(said.getvalue(), "hello\n" if accelerator.is_local_main_process else "")
    accelerator.wait_for_everyone()


@row("split_between_processes")
def split(folder: Path) -> None:
    accelerator = start()
    size, rank = accelerator.num_processes, accelerator.process_index

    def part(count: int) -> list[int]:
        each, more = divmod(count, size)
        begin = rank * each + min(rank, more)
        return list(range(begin, begin + each + (rank < more)))

    for count in (0, 1, 5, 8):
        items = list(range(count))
        with accelerator.split_between_processes(items) as found:
            same(list(found), part(count))
        with accelerator.split_between_processes(tuple(items)) as found:
            same(list(found), part(count))
        with accelerator.split_between_processes(torch.arange(count)) as found:
            same(found.tolist(), part(count))
    with accelerator.split_between_processes({"a": list(range(5)), "b": list("vwxyz")}) as found:
        same(found, {"a": part(5), "b": ["vwxyz"[i] for i in part(5)]})
    with (
        refused("a", "b"),
        accelerator.split_between_processes({"a": [1, 2], "b": [1]}) as found,
    ):
        assert size == 1, "dictionaries of unequal lengths"
        raise ValueError("a b: P = 1 is untouched")
    with accelerator.split_between_processes(list(range(5)), apply_padding=True) as found:
        longest = -(-5 // size)
        expected = (part(5) + [4] * longest)[:longest]
        same(list(found), expected)
    dataset = torch.utils.data.TensorDataset(torch.arange(5))
    with accelerator.split_between_processes(dataset) as found:
        same([int(item[0]) for item in found], part(5))
    if size == 1:
        items = [1, 2, 3]
        with accelerator.split_between_processes(items) as found:
            assert found is items


NAMES = """
    Accelerator PartialState AcceleratorState GradientState DistributedType set_seed gather_object get_logger LocalSGD
    ProjectConfiguration DataLoaderConfiguration GradientAccumulationPlugin find_executable_batch_size
    skip_first_batches PermutationSampler broadcast_object_list debug_launcher notebook_launcher synchronize_rng_states
"""


@row("every name of the table is importable from hpcaccel")
def importable(folder: Path) -> None:
    for name in NAMES.split():
        assert getattr(hpcaccel, name) is not None
