"""Models on the meta device, where tensors have shapes but no values: building them, and giving them memory.

Training must not start from uninitialised memory. So new memory is filled with NaN, and the first forward pass raises
an error if a parameter is still all NaN. The check does not depend on how values are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hpcaccel.core.formatting import shortened
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.device_mesh import is_dtensor

__all__ = [
    "expect_values",
    "give_memory",
    "has_values",
    "init_empty_weights",
    "init_on_device",
    "is_empty",
    "tied_places",
]

_GUARD = "_hpcaccel_guard"
"""Attribute of a model: the handle of the hook that checks for values."""


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Context manager: models built in the block have parameters on the meta device, with shapes but without values or
    memory.

    Args:
        include_buffers: create buffers on the meta device too. By default buffers have values, because non-persistent
            buffers are not in checkpoints.
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Context manager: models built in the block have their parameters on ``device``.

    Args:
        include_buffers: also create buffers on ``device``.
    """
    device = torch.device(device)
    if include_buffers:
        with device:
            yield
        return
    register = nn.Module.register_parameter
    nn.Module.register_parameter = _placing(register, device)  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _placing(register: Callable[..., None], device: torch.device) -> Callable[..., None]:
    """Returns a ``register_parameter`` that also moves parameters to ``device``. Tied parameters remain tied."""
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or param.device == device:
            return
        if id(param) not in moved:
            options: dict[str, Any] = {**param.__dict__, "requires_grad": param.requires_grad}
            # The original is kept, so that no other parameter gets its id; its memory is freed below.
            moved[id(param)] = (param, type(param)(param.to(device), **options))
            if device.type == "meta" and param.untyped_storage().resizable():
                param.untyped_storage().resize_(0)
        module._parameters[name] = moved[id(param)][1]

    return register_parameter


def is_empty(model: nn.Module) -> bool:
    """Whether any parameter is on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def give_memory(
    model: nn.Module,
    device: torch.device,
    *,
    buffers_on: torch.device | None = None,
    but: Collection[int] = (),
    expect: bool = True,
) -> None:
    """Allocate memory on ``device`` for a model's tensors on the meta device; other tensors are unchanged. Tied
    parameters remain tied, and sharded parameters remain the same objects.

    Floating-point parameters are NaN until they are loaded. Non-persistent buffers are computed by their module's
    ``reset_parameters``, which may also set parameters of this module.

    Args:
        buffers_on: device of the buffers; default: ``device``.
        but: ids of tensors that stay on the meta device.
        expect: whether values are loaded later. If True, buffers are computed now, and the first forward pass checks
            for values. If False, the caller sets all values immediately.

    Raises:
        RuntimeMisuse: ``expect`` is set, and the module of a non-persistent buffer has no ``reset_parameters``.
    """
    empty = {name for name, parameter in model.named_parameters() if parameter.is_meta and id(parameter) not in but}
    owners = [
        module
        for module in model.modules()
        if any(buffer.is_meta and id(buffer) not in but for _, buffer in _own_buffers(module))
    ]
    ties = tied_places(model)
    parameters = {id(parameter) for parameter in model.parameters()}

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta or id(tensor) in but:
            return tensor
        return torch.empty_like(tensor, device=device if id(tensor) in parameters else buffers_on or device)

    model._apply(placed)  # type: ignore[no-untyped-call]
    for first, *others in ties:
        for module, name in others:
            module._parameters[name] = first[0]._parameters[first[1]]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in empty:
                _local(parameter).fill_(float("nan") if parameter.is_floating_point() else 0)
        for module in owners if expect else ():
            _compute_buffers(module)
    if empty and expect:
        expect_values(model)


def _own_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]


def tied_places(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """For each tied parameter, all pairs of module and name under which the parameter is registered."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _compute_buffers(module: nn.Module) -> None:
    """Compute the non-persistent buffers of a module; persistent buffers are loaded later."""
    names = [name for name, _ in _own_buffers(module) if name in module._non_persistent_buffers_set]
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    elif names:
        raise RuntimeMisuse(
            f"{type(module).__name__} was created on the meta device, and its non-persistent buffers are not saved in "
            f"checkpoints: {', '.join(names)}. Compute them in a reset_parameters() of the class, or create the model "
            "under hpcaccel.init_empty_weights(), which does not create buffers on the meta device"
        )


def expect_values(model: nn.Module) -> None:
    """Register a hook that checks before the first forward pass that all parameters have values."""
    has_values(model)
    model.__dict__[_GUARD] = model.register_forward_pre_hook(_look)


def has_values(model: nn.Module) -> None:
    """Remove the hook of ``expect_values``. Call this once the parameters have values."""
    guard = model.__dict__.pop(_GUARD, None)
    if guard is not None:
        guard.remove()


def _look(model: nn.Module, _inputs: Any) -> None:
    """Forward pre-hook that checks once that all parameters have values.

    Raises:
        RuntimeMisuse: some parameters have no values.
    """
    missing = [name for name, parameter in model.named_parameters() if _is_nan(_local(parameter))]
    if missing:
        raise RuntimeMisuse(
            "the model was created on the meta device, and these parameters are still uninitialised: "
            f"{shortened(missing, 3)}. After prepare() call hpcaccel.load_sharded(model, path) or "
            "accelerator.load_state(), or initialise them"
        )
    has_values(model)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = parameter.detach()
    return local.to_local() if is_dtensor(local) else local  # type: ignore[attr-defined]


def _is_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and bool(tensor.isnan().all())
