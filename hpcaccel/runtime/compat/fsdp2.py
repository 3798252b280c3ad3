"""Accelerate's functions around FSDP2, for libraries that prepare a model without ``prepare``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpcaccel.core.formatting import shortened
from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.distributed.device_mesh import is_dtensor
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.launch_env import USE_FSDP
from hpcaccel.runtime.parallel import meta_device
from hpcaccel.runtime.parallel.compiling import compile_blocks
from hpcaccel.runtime.parallel.forward_wrappers import LastingRecomputedForward, recompute

__all__ = [
    "compile_regions_deepspeed",
    "compile_regions_fsdp2",
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "ensure_weights_retied",
    "fsdp2_apply_ac",
    "fsdp2_canonicalize_names",
    "fsdp2_load_full_state_dict",
    "fsdp2_prepare_model",
    "fsdp2_switch_optimizer_parameters",
    "get_fsdp2_grad_scaler",
    "get_model_tp_size",
]

_RAM_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
"""Parts of a parameter's name that torch's activation checkpointing and ``torch.compile`` add."""


def enable_fsdp_ram_efficient_loading() -> None:
    """Let transformers' ``from_pretrained`` read weights on the first rank of each node only. ``prepare`` sends rank
    0's to all ranks. This also selects FSDP, unless ``ACCELERATE_USE_FSDP`` is set."""
    os.environ.setdefault(USE_FSDP, "True")
    os.environ[_RAM_EFFICIENT] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Let transformers' ``from_pretrained`` read weights on all ranks."""
    os.environ[_RAM_EFFICIENT] = "False"


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model in place, as ``prepare`` does, with the Accelerator's plugin, mesh and precision. The model is not
    trained with the Accelerator's methods and not saved by ``save_state``: a frozen reference model, for example. A
    model that is sharded already is returned unchanged. All ranks call this.

    Returns:
        ``model``.

    Raises:
        RuntimeMisuse: the Accelerator's strategy is not ``fsdp``; or for one of the reasons in ``fsdp.shard``.
    """
    from torch.distributed.fsdp import FSDPModule

    from hpcaccel.runtime.model_preparation import shard_model
    from hpcaccel.runtime.parallel.compiling import strip

    if isinstance(strip(model)[0], FSDPModule):
        return model
    setup = _setup(accelerator, "fsdp2_prepare_model()")
    shard_model(setup, model)
    return model


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Let the model's blocks recompute their activations in the backward pass. The plugin decides which modules are
    blocks, as for sharding. Modules and parameters keep their names.

    Returns:
        ``model``.

    Raises:
        RuntimeMisuse: the Accelerator's strategy is not ``fsdp``; the model has no blocks.
    """
    from hpcaccel.runtime.parallel.fsdp_choices import choose

    setup = _setup(accelerator, "fsdp2_apply_ac()")
    recompute(choose(setup.settings, setup.handlers.fsdp).find_blocks(model), LastingRecomputedForward)
    return model


def _setup(accelerator: Any, call: str) -> Any:
    setup = accelerator._setup
    if setup.settings.strategy != "fsdp":
        raise RuntimeMisuse(
            f'{call} needs Accelerator(strategy="fsdp") or a fsdp_plugin, but the strategy is '
            f"{setup.settings.strategy!r}"
        )
    return setup


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> nn.Module:
    """Load rank 0's whole state dict into a sharded model, in place: one tensor at a time is sent to all ranks, and
    each keeps its shard. Parameters on the meta device are allocated first. All ranks call this.

    Args:
        full_sd: the whole tensors by name on rank 0; not used on the other ranks.
        cpu_offload: whether parameters on the meta device are allocated in CPU memory.

    Returns:
        ``model``.

    Raises:
        CheckpointError: on all ranks, if ``full_sd`` lacks a tensor of the model or contains shards, or shapes differ.
    """
    from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
    from hpcaccel.runtime.checkpointing.stored_state import MainState

    group = World.current().group
    if meta_device.is_empty(model):
        where = torch.device("cpu") if cpu_offload else group.device
        meta_device.give_memory(model, where, buffers_on=group.device)
    targets = {name: one for name, one in model.state_dict().items() if isinstance(one, torch.Tensor)}
    given = full_sd if group.is_main else {}
    content = CheckpointRanks.of(group).run(
        "fsdp2_load_full_state_dict()",
        lambda: {name: _whole(given[name]) for name in targets if name in given},
    )
    stored = MainState(Path("the state dict of rank 0"), content if group.is_main else None, group)
    if missing := [name for name in targets if (name,) not in stored.tensors]:
        raise CheckpointError(f"fsdp2_load_full_state_dict(): the state dict of rank 0 lacks {shortened(missing, 5)}")
    for name, target in targets.items():
        shape, _ = stored.tensors[(name,)]
        if shape != tuple(target.shape):
            raise CheckpointError(
                f"fsdp2_load_full_state_dict(): {name} has shape {shape} in the state dict of rank 0, but "
                f"{tuple(target.shape)} in the model"
            )
    for name, target in targets.items():
        stored.fill((name,), target)
    meta_device.has_values(model)
    return model


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if is_dtensor(tensor):
        raise CheckpointError(
            "whole tensors are needed, but the state dict of rank 0 contains shards: pass "
            "accelerator.get_state_dict(model)"
        )
    return tensor.detach()


def fsdp2_switch_optimizer_parameters(optimizer: Optimizer, mapping: Mapping[Any, torch.Tensor]) -> None:
    """Replace an optimizer's parameters in place.

    Args:
        mapping: the new parameter for each address of an old one: its ``data_ptr()``, or its attribute ``data_ptr`` if
            the script has put a number there.

    Raises:
        RuntimeMisuse: ``mapping`` lacks a parameter of the optimizer. The optimizer is unchanged.
    """
    found = []
    for place, group in enumerate(optimizer.param_groups):
        keys = [one.data_ptr() if callable(one.data_ptr) else one.data_ptr for one in group["params"]]
        if lost := [number for number, key in enumerate(keys) if key not in mapping]:
            raise RuntimeMisuse(
                f"fsdp2_switch_optimizer_parameters(): the mapping has no parameter for {len(lost)} of the "
                f"{len(keys)} parameters in group {place} of {type(optimizer).__name__}, such as number {lost[0]}. "
                "Create the optimizer from the parameters of the model that is sharded"
            )
        found.append([mapping[key] for key in keys])
    for group, parameters in zip(optimizer.param_groups, found, strict=True):
        group["params"] = parameters


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, by names without the parts that activation checkpointing and ``torch.compile`` add."""
    return {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): value
        for name, value in named_params.items()
    }


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], Any]:
    """Wrap ``param_init_fn``, which creates a module's parameters for FSDP1, so that parameters that are tied in
    ``model`` are tied again. Returns ``param_init_fn`` itself if none are tied.

    Args:
        device: not used.
    """
    # The parameters are kept, so that no new one gets their id.
    tied = [module._parameters[name] for (module, name), *_ in meta_device.tied_places(model)]
    ties = {id(parameter): parameter for parameter in tied}
    if not ties:
        return param_init_fn
    first: dict[int, nn.Parameter] = {}

    def initialise(module: nn.Module) -> Any:
        own = {name: id(one) for name, one in module._parameters.items() if id(one) in ties}
        made = param_init_fn(module)
        here = made if isinstance(made, nn.Module) else module
        for name, key in own.items():
            current = here._parameters[name]
            assert current is not None
            here._parameters[name] = first.setdefault(key, current)
        return made

    return initialise


def get_fsdp2_grad_scaler(**kwargs: Any) -> Any:
    """torch's ``GradScaler`` with these arguments, which scales gradients of sharded models, too."""
    from torch.amp.grad_scaler import GradScaler

    return GradScaler(**kwargs)


def get_model_tp_size(model: nn.Module) -> int | None:
    """Number of ranks among which the model's layers are split by tensor parallelism, as transformers or ``prepare``
    have recorded it; None if they are not split."""
    size = getattr(model, "tp_size", None)
    if size is None:
        plan = getattr(getattr(model, "config", None), "distributed_config", None)
        size = plan.get("tp_size") if isinstance(plan, Mapping) else getattr(plan, "tp_size", None)
    if size is None:
        for parameter in model.parameters():
            mesh = parameter.device_mesh if is_dtensor(parameter) else None  # type: ignore[attr-defined]
            if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
                return int(mesh.size(mesh.mesh_dim_names.index("tp")))
    return size


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile repeated blocks in place and individually. A module without repeated blocks is compiled as a whole.
    The module's hooks, such as those of ``fully_shard``, stay outside the compiled code.

    Returns:
        ``module``.
    """
    if not compile_blocks(module, compile_kwargs):
        module.compile(**compile_kwargs)
    return module


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile repeated blocks in place, as ``compile_regions_fsdp2`` does: for the module of a ``DeepSpeedEngine``."""
    compile_regions_fsdp2(module, **compile_kwargs)
