"""Memory for models that were built on the meta device, where tensors have shapes and no values.

Memory without values is dangerous: a training would start from whatever lies there. So it is filled with NaN, and the
first forward pass refuses parameters that are still all NaN, whichever way the others got their values.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallel.dtensors import is_dtensor

__all__ = ["expect_values", "give_memory", "has_values", "is_empty"]

_GUARD = "_hpcaccel_guard"


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
    """Memory on ``device`` for what is on the meta device; everything else stays. Ties survive, and so does the
    identity of sharded parameters.

    Parameters are NaN until they are loaded. Buffers that no file holds are computed again by their module's
    ``reset_parameters``.

    Args:
        buffers_on: where buffers go; None: to ``device`` as well.
        but: ids of tensors that stay on the meta device.
        expect: the values come later: compute buffers, and look for values before the first forward pass. False: the
            caller fills in everything at once.

    Raises:
        RuntimeMisuse: such a buffer's module has no ``reset_parameters``.
    """
    empty = {name for name, parameter in model.named_parameters() if parameter.is_meta and id(parameter) not in but}
    owners = [
        module
        for module in model.modules()
        if any(buffer.is_meta and id(buffer) not in but for _, buffer in _own_buffers(module))
    ]
    ties = _ties(model)
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


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Parameters of several names, with every place where they are registered."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _compute_buffers(module: nn.Module) -> None:
    """Of a module whose buffers came from the meta device: those that a file holds are loaded later."""
    names = [name for name, _ in _own_buffers(module) if name in module._non_persistent_buffers_set]
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    elif names:
        raise RuntimeMisuse(
            f"{type(module).__name__} was built on the meta device, and its {', '.join(names)} is in no checkpoint: "
            "give the class a reset_parameters() that computes it, or build the model under "
            "hpcaccel.init_empty_weights(), which leaves buffers alone"
        )


def expect_values(model: nn.Module) -> None:
    """Look at the parameters before the first forward pass."""
    has_values(model)
    model.__dict__[_GUARD] = model.register_forward_pre_hook(_look)


def has_values(model: nn.Module) -> None:
    """No need to look any more."""
    guard = model.__dict__.pop(_GUARD, None)
    if guard is not None:
        guard.remove()


def _look(model: nn.Module, _inputs: Any) -> None:
    """
    Raises:
        RuntimeMisuse: there are parameters that nobody has given values.
    """
    missing = [name for name, parameter in model.named_parameters() if _is_nan(_local(parameter))]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise RuntimeMisuse(
            f"the model was built without values, and these parameters have none yet: {shown}. "
            "After prepare() call hpcaccel.load_sharded(model, path), accelerator.load_state(), or initialise them"
        )
    has_values(model)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = parameter.detach()
    return local.to_local() if is_dtensor(local) else local  # type: ignore[attr-defined]


def _is_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and bool(tensor.isnan().all())
