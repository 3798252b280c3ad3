"""``prepare``: the script's own objects in, ready for the group of ranks out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime import parallel
from hpcaccel.runtime.data import PreparedLoader
from hpcaccel.runtime.optim import PreparedOptimizer, PreparedScheduler
from hpcaccel.runtime.precision import COMPUTE_DTYPES, wrap_forward
from hpcaccel.runtime.session import Session

__all__ = ["prepare"]

MARK = "_hpcaccel_prepared"


def prepare(session: Session, objects: Sequence[Any], *, even_batches: bool, scheduler_repeats: int) -> list[Any]:
    """Models first, for optimizers point to their parameters; schedulers last, for they follow the optimizers.

    Raises:
        RuntimeMisuse: an optimizer of whole parameters was left behind when its model was sharded.
    """
    ready: dict[int, Any] = {}
    for index, item in enumerate(objects):
        if isinstance(item, nn.Module):
            ready[index] = _model(session, item)
    for index, item in enumerate(objects):
        if isinstance(item, Optimizer):
            ready[index] = _optimizer(session, item)
        elif isinstance(item, DataLoader):
            ready[index] = _loader(session, item, even_batches=even_batches)
    for index, item in enumerate(objects):
        if isinstance(item, LRScheduler | ReduceLROnPlateau):
            ready[index] = _scheduler(session, item, repeats=scheduler_repeats)
    return [ready.get(index, item) for index, item in enumerate(objects)]


def _model(session: Session, model: nn.Module) -> nn.Module:
    if getattr(model, MARK, False):
        return model
    settings, group = session.settings, session.group
    model.to(group.device)
    if settings.mixed_precision in COMPUTE_DTYPES:
        wrap_forward(model, group.device, settings.mixed_precision)
    if settings.strategy == "fsdp":
        session.shards |= parallel.shard(model, group, settings)
        prepared = model
    else:
        prepared = parallel.wrap_ddp(model, group, settings)
    setattr(prepared, MARK, True)
    session.prepared.models.append(prepared)
    return prepared


def _optimizer(session: Session, optimizer: Optimizer) -> PreparedOptimizer:
    if isinstance(optimizer, PreparedOptimizer):
        return optimizer
    parallel.point_to_shards(optimizer, session.shards)
    _refuse_whole_parameters(session, optimizer)
    first = not session.prepared.optimizers
    session.prepared.optimizers.append(optimizer)
    face = PreparedOptimizer(
        optimizer,
        session.accumulation,
        scaler=session.scaler,
        on_step=session.loop.count_step if first else _nothing,
    )
    session.faces.append(face)
    return face


def _refuse_whole_parameters(session: Session, optimizer: Optimizer) -> None:
    """An optimizer of parameters that no prepared model has would step tensors that never get a gradient."""
    if not session.prepared.models:
        return
    known = {parameter for model in session.prepared.models for parameter in model.parameters()}
    if not any(parameter in known for group in optimizer.param_groups for parameter in group["params"]):
        raise RuntimeMisuse(
            f"{type(optimizer).__name__} holds no parameter of a prepared model. "
            "Was it built on another model, or on a copy made before?"
        )


def _nothing() -> None:
    """What happens when an optimizer steps that does not count the steps."""


def _loader(session: Session, loader: DataLoader[Any], *, even_batches: bool) -> PreparedLoader:
    if isinstance(loader, PreparedLoader):
        return loader
    # Every rank draws, so that their generators stay together, and rank 0's number counts.
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    generator = getattr(getattr(loader.batch_sampler, "sampler", loader.sampler), "generator", None)
    if generator is not None:
        generator.set_state(session.group.from_main(generator.get_state()))
    prepared = PreparedLoader(
        loader,
        group=session.group,
        accumulation=session.accumulation,
        hooks=session.loop,
        seed=session.group.from_main(seed),
        even_batches=even_batches,
    )
    session.prepared.loaders.append(prepared)
    return prepared


def _scheduler(session: Session, scheduler: Any, *, repeats: int) -> PreparedScheduler:
    if isinstance(scheduler, ReduceLROnPlateau):
        repeats = 1  # it counts evaluations, not steps
    session.prepared.schedulers.append(scheduler)
    followed = [face for face in session.faces if scheduler.optimizer in (face, face.optimizer)]
    return PreparedScheduler(scheduler, followed, session.accumulation, repeats=repeats)
