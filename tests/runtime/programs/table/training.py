"""A step: backward, accumulate, clip, precision, optimizers and schedules."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from hpcaccel import GradientAccumulationPlugin, GradScalerKwargs

from . import anew, linear, numbers, refused, row, same, start, weight_of


def gradient(accelerator: Any, model: Any) -> float:
    return round(float(accelerator.unwrap_model(model).weight.grad), 6)


@row("backward")
def backward(folder: Path) -> None:
    accelerator = start(gradient_accumulation_steps=4)
    model = accelerator.prepare(linear())
    accelerator.backward(model(torch.full((2, 1), 8.0)).mean())
    same(gradient(accelerator, model), 2.0)
    accelerator = anew(mixed_precision="bf16")
    model = accelerator.prepare(linear())
    loss = model(torch.ones(1, 1)).sum()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)
    same(gradient(accelerator, model), 2.0)


@row("accumulate")
def accumulate(folder: Path) -> None:
    accelerator = start(gradient_accumulation_steps=2)
    size, rank = accelerator.num_processes, accelerator.process_index
    model = linear(0.0)
    optimizer = SGD(model.parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, numbers(5 * size, 1))
    flags, weights, grads = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[:, None]).mean())
            flags.append(accelerator.sync_gradients)
            grads.append(gradient(accelerator, model))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        weights.append(weight_of(accelerator, model))
    same(flags, [False, True, False, True, True])
    rounds = [[turn * size + other for other in range(size)] for turn in range(5)]
    means = [sum(values) / size for values in rounds]
    same(grads[0], rounds[0][rank] / 2)  # local gradient, off the boundary
    same(grads[1], (means[0] + means[1]) / 2)
    steps = [(means[0] + means[1]) / 2, (means[2] + means[3]) / 2, means[4] / 2]
    expected = [0.0, -steps[0], -steps[0], -sum(steps[:2]), -sum(steps)]
    same([round(weight, 4) for weight in weights], [round(weight, 4) for weight in expected])
    same(schedule.scheduler.last_epoch, 3 * size)  # ``size`` per step, none off the boundary


@row("accumulation settings")
def accumulation_settings(folder: Path) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False, adjust_scheduler=False)
    accelerator = start(gradient_accumulation_plugin=plugin)
    model = linear()
    optimizer = SGD(model.parameters(), lr=0.0)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, schedule, numbers(5 * accelerator.num_processes, 1)
    )
    flags = []
    for batch in loader:
        with accelerator.accumulate(model):
            flags.append(accelerator.sync_gradients)
            accelerator.backward(model(batch[:, None]).mean())
            optimizer.step()
            schedule.step()
    same(flags, [False, True, False, True, False])
    same(schedule.scheduler.last_epoch, 2 * accelerator.num_processes)
    accelerator.gradient_accumulation_steps = 1
    with accelerator.accumulate(model):
        same(accelerator.sync_gradients, True)


@row("no_sync and trigger_sync_in_backward")
def no_sync(folder: Path) -> None:
    accelerator = start()
    model = accelerator.prepare(linear())
    rank, size = accelerator.process_index, accelerator.num_processes
    mean = (size - 1) / 2
    data = torch.full((1, 1), float(rank))
    with accelerator.no_sync(model):
        accelerator.backward(model(data).sum())
    same(gradient(accelerator, model), float(rank))
    accelerator.backward(model(data * 0).sum())
    same(gradient(accelerator, model), mean)
    model.zero_grad()
    with accelerator.no_sync(model):
        first = model(data).sum()
        second = model(data).sum()
    accelerator.backward(first)
    same(gradient(accelerator, model), float(rank))
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    same(gradient(accelerator, model), 2 * mean)


@row("clip_grad_norm_ and clip_grad_value_")
def clip(folder: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        accelerator = anew(strategy=strategy)
        model = nn.Sequential(linear(1.0), linear(2.0))
        model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=1.0))
        accelerator.backward(model(torch.ones(1, 1)).sum())  # gradients 2 and 1
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        same(round(float(norm), 4), round(5**0.5, 4))
        same(round(float(accelerator.clip_grad_norm_(model.parameters(), 100.0)), 4), 1.0)
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(1, 1)).sum())
        only_first = [next(model.parameters())]
        same(round(float(accelerator.clip_grad_norm_(only_first, 1.0)), 4), 2.0)
        accelerator.clip_grad_value_(model.parameters(), 0.25)
        same(round(float(accelerator.clip_grad_norm_(model.parameters(), 100.0)), 4), round(0.125**0.5, 4))


class Casts(nn.Module):
    """Records the dtype it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.saw: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        self.saw = out.dtype
        return {"out": out}


@row("mixed_precision and autocast")
def precision(folder: Path) -> None:
    accelerator = start(mixed_precision="bf16")
    raw = Casts()
    model = accelerator.prepare(raw)
    out = model(torch.ones(1, 1))["out"]
    same((raw.saw, out.dtype), (torch.bfloat16, torch.float32))
    same(accelerator.mixed_precision, "bf16")
    with accelerator.autocast():
        same(linear()(torch.ones(1, 1)).dtype, torch.bfloat16)
    accelerator.backward((out - 2).square().mean())
    assert raw.layer.weight.grad is not None
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert plain is raw
    accelerator = anew(mixed_precision="bf16", fp32_outputs=False)
    same(accelerator.prepare(Casts())(torch.ones(1, 1))["out"].dtype, torch.bfloat16)
    with refused("fp12", "bf16"):
        anew(mixed_precision="fp12")
    anew()


@row("fp16 on a CPU, optimizer_step_was_skipped")
def fp16(folder: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator = start(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
    same(len([warning for warning in said if "fp16" in str(warning.message)]), 1)
    model = linear()
    optimizer = SGD(model.parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    lr = [schedule.get_last_lr()[0]]
    skipped = []
    for scale in (1.0, float("inf"), 1.0):
        loss = model(torch.ones(1, 1)).sum() * scale
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 10.0)
        if scale == 1.0:
            same(round(float(norm), 3), 1.0)  # unscaled first
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        same(optimizer.step_was_skipped, skipped[-1])
        lr.append(schedule.get_last_lr()[0])
    same(skipped, [False, True, False])
    assert lr[2] == lr[1] != lr[3], lr


@row("prepared scheduler")
def scheduler(folder: Path) -> None:
    for words, steps in (
        ({}, None),
        ({"step_scheduler_per_process": False}, 1),
        ({"split_batches": True}, 1),
        ({"step_scheduler_with_optimizer": False}, 1),
    ):
        accelerator = anew(**words)
        model = linear()
        optimizer = SGD(model.parameters(), lr=1.0)
        schedule, optimizer, model = accelerator.prepare(
            LambdaLR(optimizer, lambda step: 1 / (1 + step)), optimizer, model
        )
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        schedule.step()
        expected = accelerator.num_processes if steps is None else steps
        same(schedule.get_last_lr(), [1 / (1 + expected)])
        state = schedule.state_dict()
        schedule.load_state_dict(state)
        same(schedule.scheduler.last_epoch, expected)


@row("join_uneven_inputs")
def join(folder: Path) -> None:
    accelerator = start(even_batches=False)
    size, rank = accelerator.num_processes, accelerator.process_index
    model = linear(0.0)
    optimizer = SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    steps = 0
    with accelerator.join_uneven_inputs([model]):
        for _ in range(2 + rank):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    same(steps, 2 + rank)
    weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
    assert torch.allclose(weights, weights[-1].expand_as(weights)) or size == 1, weights
    accelerator = anew()
    loader = accelerator.prepare(numbers(2 * size + 1, 1))
    model = accelerator.prepare(linear())
    with accelerator.join_uneven_inputs([model], even_batches=False):
        count = 0
        for batch in loader:
            accelerator.backward(model(batch[:, None]).sum())
            count += 1
    same(count, 3 if rank == 0 else 2)
    same(len(list(loader)), 3)


@row("LocalSGD")
def local_sgd(folder: Path) -> None:
    from hpcaccel import LocalSGD

    accelerator = start()
    rank = accelerator.process_index
    model = linear(0.0)
    optimizer = SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    seen = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local:
        for _ in range(4):
            accelerator.backward(model(torch.full((1, 1), float(rank))).sum())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            seen.append(weight_of(accelerator, model))
    mean = (accelerator.num_processes - 1) / 2
    same(seen, [-float(rank), -2 * mean, -2 * mean - rank, -4 * mean])


@row("profile")
def profile(folder: Path) -> None:
    from hpcaccel import ProfileKwargs

    accelerator = start()
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(folder))) as profiler:
        linear()(torch.ones(1, 1))
    assert any("linear" in event.key for event in profiler.key_averages())
    accelerator.wait_for_everyone()
    same(len(list(folder.glob("profile_*.json"))), accelerator.num_processes)
