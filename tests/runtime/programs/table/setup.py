"""prepare, the constructor, trackers and loggers."""

from __future__ import annotations

import io
import logging
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from hpcaccel import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    get_logger,
)
from hpcaccel.tracking import GeneralTracker

from . import anew, linear, numbers, refused, row, same, start


@row("prepare")
def prepare(folder: Path) -> None:
    accelerator = start()
    model = linear()
    optimizer = SGD(model.parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    stranger = object()
    out = accelerator.prepare(schedule, numbers(4, 2), stranger, optimizer, model)
    assert isinstance(out[1], DataLoader)
    assert out[2] is stranger
    assert isinstance(out[3], torch.optim.Optimizer)
    assert out[3].param_groups[0]["params"][0] is accelerator.unwrap_model(out[4]).weight
    for before, after in zip(out, accelerator.prepare(*out), strict=True):
        assert before is after
    single = accelerator.prepare(linear())
    assert isinstance(single, nn.Module)
    with refused("prepare"):
        accelerator.prepare(optimizer)  # the raw optimizer of a prepared one
    if accelerator.num_processes > 1:
        with refused("prepare"):
            accelerator.prepare(model)
    frozen = linear().requires_grad_(False)
    assert accelerator.prepare(frozen) is frozen
    with refused("no parameter of a prepared model"):
        accelerator.prepare(linear(), SGD(linear().parameters(), lr=1.0))
    accelerator = anew()
    anew_wrapped = accelerator.prepare(out[4])
    assert accelerator.unwrap_model(anew_wrapped) is accelerator.unwrap_model(out[4])
    accelerator.backward(anew_wrapped(torch.ones(1, 1)).sum())


@row("prepare: rank 0's parameters and buffers, ties")
def broadcast(folder: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        accelerator = anew(strategy=strategy)
        torch.manual_seed(accelerator.process_index)
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
        model[2].weight = model[0].weight
        model[1].running_mean.fill_(float(accelerator.process_index))
        torch.manual_seed(0)
        reference = nn.Linear(2, 2, bias=False).weight.detach()
        model = accelerator.prepare(model)
        raw = accelerator.unwrap_model(model)
        assert raw[2].weight is raw[0].weight
        same(float(raw[1].running_mean.sum()), 0.0)
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            assert torch.equal(state["0.weight"], reference)


@row("compile after prepare")
def compiled(folder: Path) -> None:
    accelerator = start(dynamo_backend="eager")
    raw = linear(2.0)
    model = accelerator.prepare(raw)
    same(float(model(torch.ones(1, 1)).detach()), 2.0)
    assert type(model).__name__ == "OptimizedModule"
    assert accelerator.unwrap_model(model) is raw
    same(list(accelerator.get_state_dict(model)), ["weight"])


@row("device_placement and to_device")
def placement(folder: Path) -> None:
    accelerator = start(device_placement=False)
    same(accelerator.device_placement, False)
    assert next(iter(accelerator.prepare(numbers(4, 2)))).device.type == "cpu"
    accelerator = anew()
    model, loader = accelerator.prepare(linear(), numbers(4, 2), device_placement=[True, False])
    assert model is not None
    assert loader is not None
    with refused("device_placement", "1", "2"):
        accelerator.prepare(linear(), numbers(4, 2), device_placement=[True])
    moved = accelerator.to_device({"a": [torch.ones(1)], "b": "text"})
    same((moved["a"][0].device, moved["b"]), (accelerator.device, "text"))


@row("constructor")
def constructor(folder: Path) -> None:
    accelerator = start(
        device_placement=True,
        split_batches=False,
        mixed_precision="no",
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(),
        deepspeed_plugin=None,
        fsdp_plugin=None,
        torch_tp_plugin=None,
        megatron_lm_plugin=None,
        rng_types=None,
        log_with=None,
        project_dir=str(folder),
        project_config=None,
        gradient_accumulation_plugin=None,
        step_scheduler_with_optimizer=True,
        kwargs_handlers=[
            AutocastKwargs(),
            DistributedDataParallelKwargs(find_unused_parameters=True),
            GradScalerKwargs(),
            InitProcessGroupKwargs(timeout=timedelta(seconds=60)),
        ],
        dynamo_backend=None,
        dynamo_plugin=None,
        deepspeed_plugins=None,
        parallelism_config=None,
    )
    same(accelerator.gradient_accumulation_steps, 2)
    same(accelerator.split_batches, False)
    same(accelerator.even_batches, True)
    same(accelerator.dispatch_batches, None)
    model = accelerator.prepare(nn.ModuleDict({"used": linear(), "unused": linear()}))
    raw = accelerator.unwrap_model(model)
    assert set(raw) == {"used", "unused"}
    with refused("logging_dir", "project_dir"):
        anew(logging_dir="logs")
    with refused("DeepSpeed"):
        anew(deepspeed_plugin=object())
    with refused("gradient_acumulation_steps"):
        anew(gradient_acumulation_steps=2)
    assert DistributedType.TPU is DistributedType.XLA
    accelerator = anew(even_batches=False, dispatch_batches=False, split_batches=True)
    same((accelerator.even_batches, accelerator.dispatch_batches, accelerator.split_batches), (False, False, True))


@row("prepare_model, prepare_optimizer, prepare_scheduler, prepare_data_loader")
def one_by_one(folder: Path) -> None:
    accelerator = start()
    raw = linear()
    model = accelerator.prepare_model(raw)
    optimizer = accelerator.prepare_optimizer(SGD(raw.parameters(), lr=1.0))
    schedule = accelerator.prepare_scheduler(LambdaLR(optimizer.optimizer, lambda step: 1.0))
    loader = accelerator.prepare_data_loader(numbers(2 * accelerator.num_processes, 2))
    for batch in loader:
        accelerator.backward(model(batch[:, None]).sum())
        optimizer.step()
        schedule.step()
    same(schedule.scheduler.last_epoch, accelerator.num_processes)
    evaluated = linear()
    assert accelerator.prepare_model(evaluated, evaluation_mode=True) is evaluated


class Remembers(GeneralTracker):
    name = "remembers"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.said

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.said.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.said.append((values, step))

    def finish(self) -> None:
        self.said.append("finished")


@row("log_with, init_trackers, log, get_tracker")
def trackers(folder: Path) -> None:
    mine = Remembers()
    accelerator = start(log_with=[mine], project_dir=str(folder))
    same(mine.said, [])
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 1.5}, step=3)
    tracker = accelerator.get_tracker("remembers", unwrap=True)
    if accelerator.is_main_process:
        assert tracker is mine.said
    accelerator.get_tracker("remembers").log({"direct": 1.0}, step=4)
    accelerator.end_training()
    expected = [("config", {"lr": 0.1}), ({"loss": 1.5}, 3), ({"direct": 1.0}, 4), "finished"]
    same(mine.said, expected if accelerator.is_main_process else [])
    with refused("nonsense", "wandb"):
        anew(log_with="nonsense").init_trackers("project")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        accelerator = anew(log_with="clearml", project_dir=str(folder))
        accelerator.init_trackers("project")
        same(accelerator.trackers, [])
    if accelerator.is_main_process:
        assert any("clearml" in str(warning.message) for warning in said), [str(w.message) for w in said]


@row("get_logger")
def loggers(folder: Path) -> None:
    accelerator = start()
    rank = accelerator.process_index
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    inner = logging.getLogger("table.row")
    inner.addHandler(handler)
    inner.propagate = False
    logger = get_logger("table.row", log_level="INFO")
    logger.info("once")
    logger.info("everywhere", main_process_only=False)
    logger.info("in order", main_process_only=False, in_order=True)
    logger.debug("not at this level")
    lines = said.getvalue().splitlines()
    same(["once" in lines[0], len(lines)], [rank == 0, 3 if rank == 0 else 2])
    if accelerator.num_processes > 1:
        assert str(rank) in lines[-1].replace("in order", ""), lines
    inner.removeHandler(handler)
