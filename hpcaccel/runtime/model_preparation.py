"""Preparation of a model: precision, activation checkpointing, tensor parallelism, DDP or FSDP2, ``torch.compile``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.compat.introspection import find_tied_parameters, retie_parameters
from hpcaccel.runtime.offload.module_hooks import is_offloaded
from hpcaccel.runtime.parallel import compiling, ddp, meta_device, precision
from hpcaccel.runtime.parallel.forward_wrappers import LastingRecomputedForward, RecomputedForward, recompute, take_off

if TYPE_CHECKING:
    from hpcaccel.runtime.accelerator_setup import Setup
    from hpcaccel.runtime.training_session import TrainingSession

__all__ = ["dispatch", "is_dispatched", "prepare_model", "shard_model"]

SHARDED_IN = "_hpcaccel_sharded_in"
"""Attribute of a sharded model: the generation of the process group over which the model is sharded, and the layout of
the mesh."""


def prepare_model(setup: Setup, model: nn.Module, *, place: bool, evaluation_mode: bool = False) -> nn.Module:
    """Apply precision, activation checkpointing, tensor parallelism, DDP or FSDP2, and ``torch.compile``.

    Args:
        place: whether to move the model to this rank's device, if it is not sharded.
        evaluation_mode: whether the model is only evaluated. If so, it is neither wrapped in DDP nor sharded.

    Raises:
        RuntimeMisuse: ``model`` is the original of a prepared model; it is on the meta device and would not be sharded;
            the ranks prepare different models; or for one of the reasons in ``_refuse``.
    """
    session = setup.session
    if session.registry.has(model):
        return model
    session.registry.refuse_original(model)
    inner, compiler = compiling.strip(model)
    if isinstance(inner, ddp.PreparedDDP):
        inner = inner.module  # the wrapper belongs to a process group that this process has left
    session.registry.refuse_original(inner)
    offloaded = is_offloaded(inner)
    evaluation_mode = evaluation_mode or offloaded
    _refuse(session, inner, evaluation_mode=evaluation_mode)
    if session.layout.context > 1:
        from hpcaccel.runtime.parallel.context_parallel import adapt_model, share_random_states

        adapt_model(inner.module if isinstance(inner, DistributedDataParallel) else inner)
        share_random_states(session.group)
    wrapped = inner if _is_wrapped(inner) and not _is_of_another_group(session, inner) else None
    own = inner.module if isinstance(inner, DistributedDataParallel) else inner
    _refit(setup, own, blocks_too=wrapped is None)
    options = None if compiler is not None else _compiler_options(setup)
    if options is not None and options["regional"] and compiling.compile_blocks(own, options):
        options = None  # done: blocks are compiled before sharding, to keep all-gathers out of the compiled code
    if wrapped is None:
        wrapped = _distribute(setup, own, place=place, evaluation_mode=evaluation_mode)
    prepared = wrapped
    if compiler is not None:
        prepared = compiler(wrapped)  # the script's own torch.compile
    elif options is not None:
        prepared = compiling.compile_whole(wrapped, options)
    session.sharded.add(own)
    compiling.hold_signals()
    for raw in (model, inner, own):
        session.registry.add(raw, prepared)
    if not offloaded:  # its weights are not here, so checkpoints cannot contain them
        session.prepared.models.append(prepared)
    session.owners[prepared] = setup.accumulation
    return prepared


def _refuse(session: TrainingSession, model: nn.Module, *, evaluation_mode: bool) -> None:
    """Refuse models that cannot be prepared.

    Raises:
        RuntimeMisuse: the model is wrapped in DataParallel or FSDP1, or in DDP with ``strategy="fsdp"``; it is sharded
            over a destroyed group and cannot be sharded again; or there are several ranks that train the model, and its
            layers are distributed over several devices.
    """
    if isinstance(model, DataParallel):
        raise RuntimeMisuse(
            "the model is wrapped in torch.nn.DataParallel, which drives several GPUs from one process. Prepare the "
            "unwrapped model, and start one process per GPU"
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise RuntimeMisuse(
            "the model is wrapped in FullyShardedDataParallel (FSDP1). Prepare the unwrapped model with "
            'Accelerator(strategy="fsdp"), which shards it with FSDP2'
        )
    if _is_of_another_group(session, model) and not _can_shard_again(session, model):
        raise RuntimeMisuse(
            "the model is sharded over a process group that has been destroyed. Its shards can be reused only with "
            'strategy="fsdp", the same layout of ranks and no tensor parallelism. Create the model again and load '
            "its weights"
        )
    if isinstance(model, DistributedDataParallel) and session.settings.strategy == "fsdp":
        raise RuntimeMisuse(
            'the model is already wrapped in DistributedDataParallel, and strategy="fsdp" cannot shard it. Prepare '
            "the unwrapped model"
        )
    if is_dispatched(model) and session.group.world_size > 1 and not evaluation_mode:
        raise RuntimeMisuse(
            "the model's layers are distributed over several devices of this process (device_map), so "
            f"{session.group.world_size} ranks cannot train it together. Load it without device_map, start one "
            "rank, or only evaluate it: accelerator.prepare_model(model, evaluation_mode=True)"
        )


def _is_of_another_group(session: TrainingSession, model: nn.Module) -> bool:
    """Whether the model was sharded over a group that has been destroyed."""
    generation, _ = getattr(model, SHARDED_IN, (session.world.generation, None))
    return bool(generation != session.world.generation)


def _can_shard_again(session: TrainingSession, model: nn.Module) -> bool:
    """Whether this training can use an earlier training's shards."""
    _, layout = getattr(model, SHARDED_IN)
    return bool(session.settings.strategy == "fsdp" and layout == session.layout and layout.tensor == 1)


def is_dispatched(model: nn.Module) -> bool:
    """Whether a device map has distributed the model's layers over several devices."""
    return any(len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules())


def dispatch(setup: Setup, model: nn.Module, device_map: Any, *, offload_folder: Any) -> nn.Module:
    """Distribute a model by a device map, which is computed if it is a string such as ``auto``. If there are several
    ranks, each has the whole model: a computed map uses only this rank's device and its share of the CPU memory.

    Raises:
        RuntimeMisuse: the model has no weights; or for the reasons that ``dispatch_model`` lists.
    """
    from hpcaccel.runtime.offload.device_map import resolve_device_map
    from hpcaccel.runtime.offload.device_memory import SPARE, get_max_memory
    from hpcaccel.runtime.offload.dispatch import dispatch_model

    if meta_device.is_empty(model):
        raise RuntimeMisuse(
            "prepare(device_map=...): the model was created on the meta device, and has no weights. Load and "
            "distribute it with hpcaccel.load_checkpoint_and_dispatch(model, path, device_map=...), then prepare it"
        )
    group = setup.session.group
    budget: dict[int | str, Any] | None = None
    if isinstance(device_map, str) and group.world_size > 1:
        free = get_max_memory()
        # Room for activations is left here: a budget that is passed to resolve_device_map is used to the full.
        budget = {key: int(SPARE * size) for key, size in free.items() if key == group.device.index}
        budget["cpu"] = free.get("cpu", 0) // max(1, group.env.local_world_size)
    places = resolve_device_map(model, device_map, max_memory=budget)
    return dispatch_model(model, places, offload_dir=offload_folder)


def _is_wrapped(model: nn.Module) -> bool:
    """Whether the model is already wrapped in DDP or sharded with FSDP2."""
    module = sys.modules.get("torch.distributed.fsdp")
    return isinstance(model, DistributedDataParallel) or (module is not None and isinstance(model, module.FSDPModule))


def _refit(setup: Setup, model: nn.Module, *, blocks_too: bool) -> None:
    """Remove wrappers of an earlier session, then wrap forwards for precision and activation checkpointing.

    Args:
        blocks_too: whether to apply fp8 conversion and activation checkpointing, if they are set.
    """
    settings, handlers = setup.settings, setup.handlers
    precision.unwrap_forward(model)
    if settings.mixed_precision == "fp8" and blocks_too:
        precision.convert_to_fp8(model, handlers.fp8)
    if setup.native_amp:
        precision.wrap_forward(
            model,
            setup.session.group.device,
            settings.mixed_precision,
            handler=handlers.autocast,
            fp32_outputs=settings.fp32_outputs,
        )
    if not blocks_too:
        return
    for module in model.modules():
        if "forward" in module.__dict__:
            take_off(module, RecomputedForward, but=(LastingRecomputedForward,))
    plugin = handlers.fsdp
    if settings.activation_checkpointing or (plugin is not None and plugin.activation_checkpointing):
        from hpcaccel.runtime.parallel.fsdp_choices import choose

        recompute(choose(settings, plugin).find_blocks(model))


def _distribute(setup: Setup, model: nn.Module, *, place: bool, evaluation_mode: bool) -> nn.Module:
    """Shard the model, or move it to the device and wrap it in DDP.

    Raises:
        RuntimeMisuse: the model is on the meta device and would not be sharded.
    """
    layout, group = setup.session.layout, setup.session.group
    if group.exchange is not None and not evaluation_mode:
        count = sum(1 for _ in model.parameters())
        group.exchange.call("prepare", form=f"{type(model).__name__} with {count} parameters")
    sharded = not evaluation_mode and (setup.settings.strategy == "fsdp" or layout.tensor > 1)
    if is_offloaded(model):
        return model
    if meta_device.is_empty(model) and not sharded:
        raise RuntimeMisuse(
            "the model was created on the meta device, and its parameters are uninitialised. Load its weights with "
            'hpcaccel.load_sharded(model, path), or shard it with Accelerator(strategy="fsdp")'
        )
    if sharded:
        shard_model(setup, model)
        return model
    if place and not is_dispatched(model):
        setup.session.shards.update(_move(model, group.device))
    return model if evaluation_mode else ddp.wrap(model, group, setup.settings, setup.handlers.ddp)


def _move(model: nn.Module, device: torch.device) -> dict[nn.Parameter, nn.Parameter]:
    """Move a model to the device, in place, and keep its tied parameters tied.

    Most devices keep the Parameter objects. On others, such as XLA, a parameter that is moved is another object: ties
    are lost, and optimizers refer to the old ones.

    Returns:
        The new parameter by its old one, for parameters that are other objects now.
    """
    before, ties = dict(model.named_parameters(remove_duplicate=False)), find_tied_parameters(model)
    model.to(device)
    retie_parameters(model, ties)
    after = dict(model.named_parameters(remove_duplicate=False))
    return {old: after[name] for name, old in before.items() if old is not after[name]}


def shard_model(setup: Setup, model: nn.Module) -> None:
    """Apply tensor parallelism, then FSDP2. Record in the session which sharded parameter replaces each original."""
    from hpcaccel.runtime.distributed.device_mesh import data_mesh, tensor_mesh
    from hpcaccel.runtime.parallel import fsdp, tensor_parallel
    from hpcaccel.runtime.parallel.fsdp_choices import choose

    session, settings, handlers = setup.session, setup.settings, setup.handlers
    layout, mesh = session.layout.of_model, session.model_mesh
    choices = choose(settings, handlers.fsdp)
    kept = fsdp.unshard(model) if _is_of_another_group(session, model) else []
    before = dict(model.named_parameters())
    done = fsdp.Tensors()
    if layout.tensor > 1:
        if not tensor_parallel.is_shared(model):
            plan = tensor_parallel.find_plan(model, handlers.tp_plan)
            fsdp.share_all(model, session.group, done=done)
            tensor_parallel.apply_plan(model, tensor_mesh(mesh), plan)
        tensor_parallel.share_generators(tensor_mesh(mesh), session.group.device)
    if layout.tensor == 1 or layout.data > 1:
        fsdp.shard(model, session.group, data_mesh(mesh), choices, done=done)
    elif meta_device.is_empty(model):
        meta_device.give_memory(model, session.group.device)
    else:
        model.to(session.group.device)
    setattr(model, SHARDED_IN, (session.world.generation, session.layout))
    after = dict(model.named_parameters())
    session.shards.update({parameter: after[name] for name, parameter in before.items()})
    fsdp.restore_shards(model, kept, session.shards)


def _compiler_options(setup: Setup) -> dict[str, Any] | None:
    return compiling.options_of(setup.handlers.dynamo, setting=setup.settings.compile)
