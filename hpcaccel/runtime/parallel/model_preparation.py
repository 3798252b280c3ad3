"""One model, from the script's own module to what the ranks train together."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallel import compiling, ddp, materialise, precision
from hpcaccel.runtime.parallel.activation import Recomputed, recompute
from hpcaccel.runtime.parallel.forwards import take_off

if TYPE_CHECKING:
    from hpcaccel.runtime.accelerator_setup import Setup
    from hpcaccel.runtime.training_session import Session

__all__ = ["is_dispatched", "prepare_model"]

SHARDED_IN = "_hpcaccel_sharded_in"
"""On a sharded model: the generation of the group that it is sharded over, and how its ranks are arranged."""


def prepare_model(setup: Setup, model: nn.Module, *, place: bool, evaluation_mode: bool = False) -> nn.Module:
    """Precision, activation checkpointing, tensor parallel, then DDP or shards, then ``torch.compile``.

    Args:
        place: whether to move it to this rank's device.
        evaluation_mode: it is not trained: precision and ``torch.compile`` only.

    Raises:
        RuntimeMisuse: the model was prepared before, or is in a state in which it cannot be.
    """
    session = setup.session
    if session.known.has(model):
        return model
    session.known.refuse_twin(model)
    inner, compiler = compiling.strip(model)
    if isinstance(inner, ddp.PreparedDDP):
        inner = inner.module  # of a group that has been left since
    session.known.refuse_twin(inner)
    _refuse(session, inner)
    wrapped = inner if _is_wrapped(inner) and not _is_of_another_group(session, inner) else None
    own = inner.module if isinstance(inner, DistributedDataParallel) else inner
    _refit(setup, own, blocks_too=wrapped is None)
    options = None if compiler is not None else _compiler_options(setup)
    if options is not None and options["regional"] and compiling.compile_blocks(own, options):
        options = None  # each block for itself, before it is sharded: gathering stays outside of what is compiled
    if wrapped is None:
        wrapped = _spread(setup, own, place=place, evaluation_mode=evaluation_mode)
    prepared = wrapped
    if compiler is not None:
        prepared = compiler(wrapped)  # as the script had compiled it before
    elif options is not None:
        prepared = compiling.compile_whole(wrapped, options)
    session.sharded.add(own)
    compiling.hold_signals()
    for raw in (model, inner, own):
        session.known.note(raw, prepared)
    session.prepared.models.append(prepared)
    session.owners[prepared] = setup.accumulation
    return prepared


def _refuse(session: Session, model: nn.Module) -> None:
    """
    Raises:
        RuntimeMisuse: see the messages.
    """
    if isinstance(model, DataParallel):
        raise RuntimeMisuse(
            "the model is in torch.nn.DataParallel, one process for many GPUs. Prepare the model itself: "
            "hpcaccel starts a process for each GPU"
        )
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise RuntimeMisuse(
            "the model is wrapped in FullyShardedDataParallel (FSDP1). Prepare the model itself with "
            'Accelerator(strategy="fsdp"), which shards it with FSDP2'
        )
    if _is_of_another_group(session, model) and not _can_shard_again(session, model):
        raise RuntimeMisuse(
            "the model is sharded over a group of ranks that has been destroyed since, and this training does not "
            "shard it over the ranks in the same way, by FSDP alone. Build it anew and load its weights"
        )
    if isinstance(model, DistributedDataParallel) and session.settings.strategy == "fsdp":
        raise RuntimeMisuse('the model is in DistributedDataParallel already, which strategy="fsdp" cannot shard')
    if is_dispatched(model) and session.group.world_size > 1:
        raise RuntimeMisuse(
            "the model's layers are spread over several devices of this process (device_map), so that "
            f"{session.group.world_size} ranks cannot train it together. Load it without device_map, or start one rank"
        )


def _is_of_another_group(session: Session, model: nn.Module) -> bool:
    """Whether the model was sharded over a group that has been destroyed since."""
    generation, _ = getattr(model, SHARDED_IN, (session.world.generation, None))
    return bool(generation != session.world.generation)


def _can_shard_again(session: Session, model: nn.Module) -> bool:
    """Whether this rank's shards of an earlier training are those of the next one."""
    _, layout = getattr(model, SHARDED_IN)
    return bool(session.settings.strategy == "fsdp" and layout == session.layout and layout.tensor == 1)


def is_dispatched(model: nn.Module) -> bool:
    """Whether a library has spread the model's layers over several devices."""
    return any(len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules())


def _is_wrapped(model: nn.Module) -> bool:
    """Whether the script has wrapped or sharded the model by itself."""
    module = sys.modules.get("torch.distributed.fsdp")
    return isinstance(model, DistributedDataParallel) or (module is not None and isinstance(model, module.FSDPModule))


def _refit(setup: Setup, model: nn.Module, *, blocks_too: bool) -> None:
    """What is put around forwards: precision, and activation checkpointing. What an earlier session has put there is
    taken off."""
    settings, handlers = setup.settings, setup.handlers
    precision.unwrap_forward(model)
    if settings.mixed_precision == "fp8" and blocks_too:
        from hpcaccel.runtime.parallel import fp8

        fp8.convert(model, handlers.fp8)
    if settings.mixed_precision in precision.COMPUTE_DTYPES:
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
            take_off(module, Recomputed)
    plugin = handlers.fsdp
    if settings.activation_checkpointing or (plugin is not None and plugin.activation_checkpointing):
        from hpcaccel.runtime.parallel.fsdp_choices import choose

        recompute(choose(settings, plugin).find_blocks(model))


def _spread(setup: Setup, model: nn.Module, *, place: bool, evaluation_mode: bool) -> nn.Module:
    """DDP or shards, where the model is to be trained by several ranks."""
    layout, group = setup.session.layout, setup.session.group
    if group.exchange is not None and not evaluation_mode:
        count = sum(1 for _ in model.parameters())
        group.exchange.call("prepare", form=f"{type(model).__name__} with {count} parameters")
    sharded = not evaluation_mode and (setup.settings.strategy == "fsdp" or layout.tensor > 1)
    if materialise.is_empty(model) and not sharded:
        raise RuntimeMisuse(
            "the model was built on the meta device and has no values. Give it some first "
            '(hpcaccel.load_sharded(model, path)), or shard it: Accelerator(strategy="fsdp")'
        )
    if sharded:
        _shard(setup, model)
        return model
    if place and not is_dispatched(model):
        model.to(group.device)
    return model if evaluation_mode else ddp.wrap(model, group, setup.settings, setup.handlers.ddp)


def _shard(setup: Setup, model: nn.Module) -> None:
    """Tensor parallel first, then shards of what each rank is left with; the session learns what became of what."""
    from hpcaccel.runtime.distributed.device_mesh import data_mesh, tensor_mesh
    from hpcaccel.runtime.parallel import fsdp, sharded_again, tensor_parallel
    from hpcaccel.runtime.parallel.fsdp_choices import choose

    session, settings, handlers = setup.session, setup.settings, setup.handlers
    layout, mesh = session.layout, session.mesh
    choices = choose(settings, handlers.fsdp)
    kept = sharded_again.take_out(model) if _is_of_another_group(session, model) else []
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
    elif materialise.is_empty(model):
        materialise.give_memory(model, session.group.device)
    else:
        model.to(session.group.device)
    setattr(model, SHARDED_IN, (session.world.generation, layout))
    after = dict(model.named_parameters())
    session.shards.update({parameter: after[name] for name, parameter in before.items()})
    sharded_again.put_back(model, kept, session.shards)


def _compiler_options(setup: Setup) -> dict[str, Any] | None:
    return compiling.options_of(setup.handlers.dynamo, setting=setup.settings.compile)
