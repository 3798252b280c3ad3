"""Questions about a model: ties, children, what has been done to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = [
    "find_tied_parameters",
    "get_module_children_bottom_up",
    "has_compiled_regions",
    "is_compiled_module",
    "is_peft_model",
    "model_has_dtensor",
    "retie_parameters",
]


def find_tied_parameters(model: nn.Module, **_: Any) -> list[list[str]]:
    """Groups of names that one parameter has; parameters with a single name are left out."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Give all names of a group the first parameter among them that holds values."""
    for group in tied_params:
        held = [model.get_parameter(name) for name in group]
        real = next((parameter for parameter in held if parameter.device.type != "meta"), None)
        if real is not None:
            for name in group:
                owner, _, last = name.rpartition(".")
                setattr(model.get_submodule(owner), last, real)


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """All modules, children before the modules that hold them; on request as ``(name, module)``."""
    named = list(_bottom_up("", model))
    return named if return_fqns else [module for _, module in named]


def _bottom_up(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _bottom_up(f"{name}.{child_name}" if name else child_name, child)
    yield name, module


def is_compiled_module(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made it."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # whoever compiled something has imported it
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made a module inside of it."""
    return bool(module._modules) and any(is_compiled_module(part) for part in module.modules())


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether a parameter is spread over ranks."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and any(isinstance(item, tensor.DTensor) for item in model.parameters())


def is_peft_model(model: nn.Module) -> bool:
    """Whether it is a ``peft.PeftModel``, inside of whatever wraps it."""
    peft = sys.modules.get("peft")
    if peft is None:
        return False
    from hpcaccel.runtime.parallel.unwrapping import unwrap

    return isinstance(unwrap(model), peft.PeftModel)
