"""``prepare``: prepares the script's models, optimizers, loaders and schedulers for the group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.accelerator_setup import Setup
from hpcaccel.runtime.data.loader import PreparedLoader, make_loader
from hpcaccel.runtime.data.sampling import bring_to_main
from hpcaccel.runtime.distributed import xla_device
from hpcaccel.runtime.model_preparation import dispatch, prepare_model
from hpcaccel.runtime.offload.module_hooks import is_offloaded
from hpcaccel.runtime.parallelism_config import sequence_size
from hpcaccel.runtime.states.accelerator_state import AcceleratorState
from hpcaccel.runtime.states.gradient_state import GradientState
from hpcaccel.runtime.training import lomo
from hpcaccel.runtime.training.prepared_optimizer import PreparedOptimizer
from hpcaccel.runtime.training.prepared_scheduler import PreparedScheduler, prepare_scheduler
from hpcaccel.runtime.training.unprepared_model import warn_if_unprepared
from hpcaccel.runtime.training_session import TrainingSession

__all__ = ["dispatch_models", "prepare"]


def prepare(setup: Setup, objects: Sequence[Any], *, device_placement: Sequence[bool] | None = None) -> list[Any]:
    """Prepare ``objects``: models first, because optimizers refer to the models' parameters; schedulers last, because
    they follow the optimizers.

    Args:
        device_placement: for each object, whether it (for a loader: its batches) is moved to this rank's device.

    Returns:
        The prepared objects, in the order of ``objects``.

    Raises:
        RuntimeMisuse: ``device_placement`` and ``objects`` differ in length; an object is the original of a prepared
            object; an optimizer has no parameter of a prepared model; or ``prepare_model`` or ``make_loader`` raises
            this error.
    """
    places = _places(setup, objects, device_placement)
    lomo.refuse_setup(setup, objects)
    ready: dict[int, Any] = {}
    if setup.session.settings.strategy == "deepspeed":
        from hpcaccel.runtime.deepspeed.engine_preparation import prepare_engine

        ready = prepare_engine(setup, objects)
        for item, place in zip(objects, places, strict=True):
            _show_states(setup, ready.get(id(item)), place)
    for kinds, make in _ORDER:
        for item, place in zip(objects, places, strict=True):
            if isinstance(item, kinds) and id(item) not in ready:
                ready[id(item)] = make(setup, item, place)
    if sequence_size(setup.session.handlers.parallelism) > 1 and any(isinstance(item, nn.Module) for item in objects):
        from hpcaccel.runtime.deepspeed.sequence_parallel import adapt_loader

        loaders = {key: one for key, one in ready.items() if isinstance(one, PreparedLoader)}
        ready |= {key: adapt_loader(one, setup.session.group.device) for key, one in loaders.items()}
    return [ready.get(id(item), item) for item in objects]


def dispatch_models(setup: Setup, objects: Sequence[Any], device_map: Any, *, offload_folder: Any) -> None:
    """Distribute the models among ``objects`` by a device map, before they are prepared.

    Raises:
        RuntimeMisuse: there is no model; parts of a model are offloaded, and there is an optimizer; or for the reasons
            that ``dispatch`` lists.
    """
    models = [item for item in objects if isinstance(item, nn.Module)]
    if not models:
        raise RuntimeMisuse("prepare(device_map=...) needs a model among its objects")
    for model in models:
        dispatch(setup, model, device_map, offload_folder=offload_folder)
    if any(map(is_offloaded, models)) and any(isinstance(item, Optimizer) for item in objects):
        raise RuntimeMisuse(
            f"prepare(device_map={device_map!r}): parts of the model are in CPU memory or on disk, and such a model "
            'cannot be trained. Train it with Accelerator(strategy="fsdp"), or leave the optimizer out'
        )


def _places(setup: Setup, objects: Sequence[Any], given: Sequence[bool] | None) -> Sequence[bool]:
    if given is None:
        return [setup.settings.device_placement] * len(objects)
    if len(given) != len(objects):
        raise RuntimeMisuse(
            f"prepare(device_placement={list(given)!r}) has {len(given)} values for {len(objects)} objects: "
            "pass one bool for each object"
        )
    return given


def _show_states(setup: Setup, prepared: Any, place: bool) -> None:
    """Give a prepared optimizer or scheduler the attributes with which Accelerate's show the states. Other objects are
    left alone.

    Args:
        place: the object's ``device_placement``.
    """
    if isinstance(prepared, PreparedOptimizer | PreparedScheduler):
        prepared.gradient_state = GradientState(_accumulation=setup.accumulation)
    if isinstance(prepared, PreparedOptimizer):
        prepared.accelerator_state, prepared.device_placement = AcceleratorState(), place


def _model(setup: Setup, model: nn.Module, place: bool) -> nn.Module:
    return prepare_model(setup, model, place=place)


def _optimizer(setup: Setup, optimizer: Optimizer, place: bool) -> PreparedOptimizer:
    session = setup.session
    if session.registry.has(optimizer):
        assert isinstance(optimizer, PreparedOptimizer)
        return optimizer
    if isinstance(optimizer, PreparedOptimizer):
        optimizer = optimizer.optimizer  # prepared in a session that has ended
    session.registry.refuse_original(optimizer)
    if session.settings.strategy == "fsdp" or session.layout.tensor > 1 or len(session.shards):
        from hpcaccel.runtime.parallel.fsdp import carry_state_over, point_to_shards

        carry_state_over(optimizer, session.shards)
        point_to_shards(optimizer, session.shards)
    _refuse_whole_parameters(session, optimizer)
    first, boundary = not session.prepared.optimizers, session.loop.boundary
    session.prepared.optimizers.append(optimizer)
    kind = lomo.LomoOptimizer if lomo.is_lomo(optimizer) else PreparedOptimizer
    prepared = kind(
        optimizer,
        setup.accumulation,
        scaling=session.scaling,
        before_step=partial(session.sharded.refuse_lost_gradients, optimizer),
        checks=session.sharded.modules,
        on_step=boundary.count_step if first else partial(boundary.other_optimizer_stepped, optimizer),
        reducer=xla_device.reducer(session.group),
    )
    if session.group.world_size > 1 and not session.prepared.models and session.group.device.type != "xla":
        models, ranks = session.prepared.models, session.group.world_size
        prepared.before_first_step(partial(warn_if_unprepared, optimizer, models, ranks=ranks))
    _show_states(setup, prepared, place)
    session.optimizers.append(prepared)
    session.registry.add(optimizer, prepared)
    return prepared


def _refuse_whole_parameters(session: TrainingSession, optimizer: Optimizer) -> None:
    """If there are prepared models, refuse an optimizer without any of their parameters."""
    if not session.prepared.models:
        return
    known = {parameter for model in session.prepared.models for parameter in model.parameters()}
    if not any(parameter in known for group in optimizer.param_groups for parameter in group["params"]):
        raise RuntimeMisuse(
            f"{type(optimizer).__name__} has no parameter of a prepared model. "
            "Create it from the parameters of the model that you prepare, not of another model or an earlier copy"
        )


def _loader(setup: Setup, loader: DataLoader[Any], place: bool) -> PreparedLoader:
    session = setup.session
    if session.registry.has(loader):
        assert isinstance(loader, PreparedLoader)
        return loader
    if isinstance(loader, PreparedLoader):
        loader = loader.user_loader  # prepared in a session that has ended
    session.registry.refuse_original(loader, setup)
    settings = setup.settings
    prepared = make_loader(
        loader,
        group=session.group,
        in_use=session.in_use,
        hooks=session.loop,
        seed=bring_to_main(loader, session.group, seedable=settings.use_seedable_sampler, data_seed=settings.data_seed),
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
    session.registry.add(loader, prepared, setup)
    return prepared


def _scheduler(setup: Setup, scheduler: Any, place: bool) -> PreparedScheduler:
    session = setup.session
    if session.registry.has(scheduler):
        assert isinstance(scheduler, PreparedScheduler)
        return scheduler
    if isinstance(scheduler, PreparedScheduler):
        scheduler = scheduler.scheduler  # it follows optimizers of a session that has ended
    session.registry.refuse_original(scheduler)
    session.prepared.schedulers.append(scheduler)
    prepared = prepare_scheduler(setup, scheduler)
    _show_states(setup, prepared, place)
    session.registry.add(scheduler, prepared)
    return prepared


_ORDER: tuple[tuple[Any, Callable[[Setup, Any, bool], Any]], ...] = (
    (nn.Module, _model),
    (Optimizer, _optimizer),
    (DataLoader, _loader),
    ((LRScheduler, ReduceLROnPlateau, PreparedScheduler), _scheduler),
)
"""Types of objects, each with the function that prepares them, in the order of preparation."""
