"""``prepare`` with DeepSpeed: one engine for the model, its optimizer and, if the engine steps it, its scheduler."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.deepspeed.auto_values import EngineParts, fill_config
from hpcaccel.runtime.deepspeed.engine_checkpoint import EngineFiles
from hpcaccel.runtime.deepspeed.engine_wrappers import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    DummyOptim,
    DummyScheduler,
    map_pytorch_optim_to_deepspeed,
)
from hpcaccel.runtime.deepspeed.plugin import DeepSpeedPlugin
from hpcaccel.runtime.deepspeed.plugin_choice import active_plugin
from hpcaccel.runtime.deepspeed.sequence_parallel import replace_attention
from hpcaccel.runtime.parallel import compiling
from hpcaccel.runtime.parallel.forward_wrappers import recompute
from hpcaccel.runtime.parallel.precision import COMPUTE_DTYPES, map_tensors, to_fp32
from hpcaccel.runtime.parallel.wrapping import repeated_blocks
from hpcaccel.runtime.parallelism_config import sequence_size
from hpcaccel.runtime.training.gradient_sync import NoSync

if TYPE_CHECKING:
    from hpcaccel.runtime.accelerator_setup import Setup
    from hpcaccel.runtime.training_session import TrainingSession

__all__ = ["prepare_engine"]

_first_generation: int | None = None
"""The process group in which this process has created its first engine. DeepSpeed keeps groups of its own in it."""


def prepare_engine(setup: Setup, objects: Sequence[Any]) -> dict[int, Any]:
    """Create the engine of the model among ``objects``. Without an optimizer, the model is only evaluated.

    Returns:
        The prepared model, optimizer and scheduler (if the engine steps it), by ``id`` of the original. Loaders and
        schedulers that the script steps are not included. Empty if ``objects`` contains no unprepared model.

    Raises:
        RuntimeMisuse: there are several models, or an optimizer without its model; the training already has an engine;
            an object or setting cannot be combined with DeepSpeed; or an ``auto`` value of the configuration cannot be
            computed.
    """
    parts, session = EngineParts.of(setup, objects), setup.session
    _refuse(session, parts)
    if not parts.models:
        return {}
    plugin, model = active_plugin(setup.handlers.deepspeed), parts.models[0]
    assert plugin is not None, "the session has selected a plugin"
    trains = bool(parts.optimizers) or "optimizer" in plugin.deepspeed_config
    if not trains and not plugin.hf_ds_config.is_zero3():
        model.to(session.group.device)
        session.registry.add(model, model)
        return {id(model): model}
    if setup.settings.activation_checkpointing:
        recompute(repeated_blocks(model))
    fill_config(setup, plugin, parts)
    engine, optimizer, scheduler = _initialize(session, plugin, parts)
    _compile(setup, engine)
    _convert_inputs_and_outputs(engine, plugin, fp32_outputs=setup.settings.fp32_outputs)
    session.registry.add(model, engine)
    ready = {id(model): engine}
    return ready | _adopt(setup, parts, engine, optimizer, scheduler) if trains else ready


def _adopt(setup: Setup, parts: EngineParts, engine: Any, optimizer: Any, scheduler: Any) -> dict[int, Any]:
    """Make the engine the one that this training steps, saves and loads. Returns the prepared optimizer and scheduler
    by the ``id`` of the script's."""
    session, group = setup.session, setup.session.group
    wrapper = DeepSpeedEngineWrapper(engine, on_step=session.loop.boundary.count_step)
    engine.__dict__["_hpcaccel_no_sync"] = NoSync(wrapper.set_reduction)
    files = EngineFiles(engine, group)
    prepared = DeepSpeedOptimizerWrapper(optimizer, on_step=wrapper.count)
    session.engine, session.prepared.attached = wrapper, files
    session.prepared.mesh.update(files.layout)
    session.prepared.models.append(engine)
    session.owners[engine] = setup.accumulation
    session.prepared.optimizers.append(optimizer)
    session.optimizers.append(prepared)
    ready: dict[int, Any] = {}
    if parts.optimizer is not None:
        ready[id(parts.optimizer)] = prepared
        session.registry.add(parts.optimizer, prepared)
    if parts.scheduler is not None:
        ready[id(parts.scheduler)] = DeepSpeedSchedulerWrapper(scheduler, prepared)
        session.registry.add(parts.scheduler, ready[id(parts.scheduler)])
    for one in parts.schedulers:
        if isinstance(one, LRScheduler):
            # The engine may step another optimizer with the same groups; torch would warn.
            vars(one.optimizer)["_opt_called"] = True
    session.loop.context.log_once(
        f"DeepSpeed: ZeRO stage {engine.zero_optimization_stage()}, {engine.train_micro_batch_size_per_gpu()} samples "
        "per rank and micro-batch"
    )
    return ready


def _refuse(session: TrainingSession, parts: EngineParts) -> None:
    """Refuse objects and settings that cannot be combined with DeepSpeed."""
    if len(parts.models) > 1:
        raise RuntimeMisuse(
            f"prepare() got {len(parts.models)} models, and DeepSpeed's engine trains one. Prepare one model with its "
            "optimizer; put models that are trained together into one torch.nn.ModuleDict"
        )
    if len(parts.optimizers) > 1:
        raise RuntimeMisuse(
            f"prepare() got {len(parts.optimizers)} optimizers, and DeepSpeed's engine has one. Use parameter groups"
        )
    if parts.optimizers and not parts.models:
        raise RuntimeMisuse(
            "DeepSpeed needs the model and its optimizer in one call: model, optimizer, ... = accelerator.prepare("
            "model, optimizer, ...)"
        )
    if parts.models and parts.optimizers and session.engine is not None:
        raise RuntimeMisuse(
            "this training already has a DeepSpeed engine, and hpcaccel trains one model with DeepSpeed. Call "
            "accelerator.free_memory() before you prepare another one"
        )
    if session.layout.tensor > 1:
        raise RuntimeMisuse(
            "tensor parallelism (tensor_parallel_size, ParallelismConfig, TorchTensorParallelPlugin) cannot be "
            "combined with DeepSpeed: set tensor_parallel.autotp_size in the DeepSpeed configuration, or use "
            "strategy=fsdp"
        )
    for model in parts.models:
        if any(parameter.is_meta for parameter in model.parameters()):
            raise RuntimeMisuse(
                "the model was created on the meta device, where its parameters have no values. Create it under "
                "deepspeed.zero.Init() (ZeRO stage 3), or on the CPU"
            )


# -- the engine


def _initialize(session: TrainingSession, plugin: DeepSpeedPlugin, parts: EngineParts) -> tuple[Any, Any, Any]:
    """Call ``deepspeed.initialize``. Returns the engine, its optimizer and its scheduler."""
    model, optimizer, scheduler = parts.models[0], parts.optimizer, parts.scheduler
    deepspeed, group, config = _import(session), session.group, plugin.deepspeed_config
    options: dict[str, Any] = {}
    if isinstance(optimizer, DummyOptim):
        options["model_parameters"] = optimizer.params
    elif optimizer is not None:
        offloads = plugin.get_value("zero_optimization.offload_optimizer.device", "none") not in (None, "none")
        if offloads and config.get("zero_force_ds_cpu_optimizer", True):
            optimizer = map_pytorch_optim_to_deepspeed(optimizer)
        options["optimizer"] = optimizer
    if isinstance(scheduler, DummyScheduler):
        if scheduler.lr_scheduler_callable is not None:
            options["lr_scheduler"] = scheduler.lr_scheduler_callable
    elif scheduler is not None:
        options["lr_scheduler"] = scheduler
    parallelism = session.handlers.parallelism
    if sequence_size(parallelism) > 1:
        samples = plugin.get_value("train_micro_batch_size_per_gpu")
        options["mpu"] = replace_attention(model, parallelism, samples=samples)
    place = SimpleNamespace(device_rank=group.device.index or 0)
    engine, own_optimizer, _, own_scheduler = deepspeed.initialize(args=place, model=model, config=config, **options)
    if group.world_size > 1:
        import torch.distributed as dist

        for buffer in engine.module.buffers():  # the engine broadcasts only parameters
            dist.broadcast(buffer, 0)
    return engine, own_optimizer, own_scheduler


def _import(session: TrainingSession) -> Any:
    """DeepSpeed, imported for this rank's device.

    It finds the process group that the session has formed. It also reads ``LOCAL_RANK``, which torchrun sets and Slurm
    does not; programs get no argument ``--local_rank``.

    Raises:
        RuntimeMisuse: this process has created an engine in a process group that has been destroyed.
    """
    global _first_generation
    generation = session.world.generation
    if _first_generation not in (None, generation):
        raise RuntimeMisuse(
            "this process has already trained with DeepSpeed and then called end_training() or "
            "destroy_process_group(). DeepSpeed keeps the destroyed process groups and cannot be initialized again: "
            "start another program, or call accelerator.free_memory() between two trainings instead"
        )
    _first_generation = generation
    os.environ.setdefault("LOCAL_RANK", str(session.group.env.local_rank))
    os.environ.setdefault("DS_ACCELERATOR", session.group.device.type)
    import deepspeed

    return deepspeed


def _compile(setup: Setup, engine: Any) -> None:
    """Let the engine compile its model, if the settings say so."""
    options = compiling.options_of(setup.handlers.dynamo, setting=setup.settings.compile)
    if options is None:
        return
    regional, backend = options.pop("regional"), options.pop("backend", "inductor")
    if regional:
        raise RuntimeMisuse("use_regional_compilation cannot be combined with DeepSpeed: compile the whole model")
    engine.compile(backend=backend, compile_kwargs=options)
    compiling.hold_signals()


def _convert_inputs_and_outputs(engine: Any, plugin: DeepSpeedPlugin, *, fp32_outputs: bool) -> None:
    """If the engine's weights are in half precision, convert floating-point inputs to it and, with ``fp32_outputs``,
    outputs to fp32, as with the other strategies."""
    dtype = COMPUTE_DTYPES.get(plugin.mixed_precision or "")
    if dtype is None:
        return

    def convert(value: Any) -> Any:
        return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def inputs(_: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, Any]:
        return convert(positional), convert(dict(named))

    def outputs(_: Any, __: Any, found: Any) -> Any:
        return to_fp32(found)

    engine.register_forward_pre_hook(inputs, with_kwargs=True)
    if fp32_outputs:
        engine.register_forward_hook(outputs)
