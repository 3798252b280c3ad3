"""``prepare``: the script's own objects in, ready for the group of ranks out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.loader import PreparedLoader
from hpcaccel.runtime.data.sampling import sampler_of
from hpcaccel.runtime.parallel.model_preparation import prepare_model
from hpcaccel.runtime.session import Session
from hpcaccel.runtime.training.optim import PreparedOptimizer
from hpcaccel.runtime.training.scheduler import PreparedScheduler, prepare_scheduler

__all__ = ["prepare"]


def prepare(session: Session, objects: Sequence[Any], *, device_placement: Sequence[bool] | None = None) -> list[Any]:
    """Models first, for optimizers point to their parameters; schedulers last, for they follow the optimizers.

    Args:
        device_placement: for each object whether it, or its batches, are moved to this rank's device.

    Raises:
        RuntimeMisuse: a list of another length; an object that was prepared before; an optimizer of whole parameters
            that was left behind when its model was sharded.
    """
    places = _places(session, objects, device_placement)
    ready: dict[int, Any] = {}
    for kinds, make in _ORDER:
        for item, place in zip(objects, places, strict=True):
            if isinstance(item, kinds) and id(item) not in ready:
                ready[id(item)] = make(session, item, place)
    return [ready.get(id(item), item) for item in objects]


def _places(session: Session, objects: Sequence[Any], given: Sequence[bool] | None) -> Sequence[bool]:
    if given is None:
        return [session.settings.device_placement] * len(objects)
    if len(given) != len(objects):
        raise RuntimeMisuse(
            f"prepare(device_placement={list(given)!r}) names {len(given)} objects, and {len(objects)} are prepared: "
            "give one True or False for each"
        )
    return given


def _model(session: Session, model: nn.Module, place: bool) -> nn.Module:
    return prepare_model(session, model, place=place)


def _optimizer(session: Session, optimizer: Optimizer, place: bool) -> PreparedOptimizer:
    if session.known.has(optimizer):
        assert isinstance(optimizer, PreparedOptimizer)
        return optimizer
    if isinstance(optimizer, PreparedOptimizer):
        optimizer = optimizer.optimizer  # its face is of a session that has ended
    session.known.refuse_twin(optimizer)
    if session.settings.strategy == "fsdp" or session.layout.tensor > 1:
        from hpcaccel.runtime.parallel.fsdp import point_to_shards

        point_to_shards(optimizer, session.shards)
    _refuse_whole_parameters(session, optimizer)
    first = not session.prepared.optimizers
    session.prepared.optimizers.append(optimizer)
    face = PreparedOptimizer(
        optimizer,
        session.accumulation,
        scaling=session.scaling,
        on_step=session.loop.count_step if first else partial(session.loop.count_another, optimizer),
    )
    session.faces.append(face)
    session.known.note(optimizer, face)
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


def _loader(session: Session, loader: DataLoader[Any], place: bool) -> PreparedLoader:
    if session.known.has(loader):
        assert isinstance(loader, PreparedLoader)
        return loader
    if isinstance(loader, PreparedLoader):
        loader = loader.user_loader  # it was prepared in a session that has ended
    session.known.refuse_twin(loader)
    settings = session.settings
    # Every rank draws, so that their generators stay together, and rank 0's number counts.
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    if settings.use_seedable_sampler:
        seed = torch.initial_seed()
    for owner in (sampler_of(loader), loader.dataset):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.set_state(session.group.from_main(generator.get_state()))
    prepared = PreparedLoader(
        loader,
        group=session.group,
        accumulation=session.accumulation,
        hooks=session.loop,
        seed=session.group.from_main(seed if settings.data_seed is None else settings.data_seed),
        even_batches=settings.even_batches,
        split_batches=settings.split_batches,
        dispatch_batches=settings.dispatch_batches,
        put_on_device=place,
        non_blocking=settings.non_blocking,
        rng_types=settings.rng_types,
        seedable=settings.use_seedable_sampler,
        stateful=settings.use_stateful_dataloader,
    )
    session.prepared.loaders.append(prepared)
    session.known.note(loader, prepared)
    return prepared


def _scheduler(session: Session, scheduler: Any, place: bool) -> PreparedScheduler:
    if session.known.has(scheduler):
        assert isinstance(scheduler, PreparedScheduler)
        return scheduler
    if isinstance(scheduler, PreparedScheduler):
        scheduler = scheduler.scheduler  # it followed optimizers of a session that has ended
    session.known.refuse_twin(scheduler)
    session.prepared.schedulers.append(scheduler)
    prepared = prepare_scheduler(session, scheduler)
    session.known.note(scheduler, prepared)
    return prepared


_ORDER: tuple[tuple[Any, Callable[[Session, Any, bool], Any]], ...] = (
    (nn.Module, _model),
    (Optimizer, _optimizer),
    (DataLoader, _loader),
    ((LRScheduler, ReduceLROnPlateau, PreparedScheduler), _scheduler),
)
