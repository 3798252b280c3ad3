"""Hooks around a module's ``forward``: attaching and removing them, and the hooks that move a whole module.

A hook is stored in the module's attribute ``_hf_hook``, and the original ``forward`` in ``_old_forward``, as in
Accelerate: transformers, diffusers and PEFT look for these names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from hpcaccel.runtime.compat.out_of_memory import clear_device_cache
from hpcaccel.runtime.distributed.collectives.nested_ops import send_to_device

__all__ = [
    "CpuOffload",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "is_offloaded",
    "outside_compiled_code",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]

Method = TypeVar("Method", bound=Callable[..., Any])

GUARDED = ("to", "cpu", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "neuron")
"""Methods that ``dispatch_model`` replaces in the model's instance, because they would move its weights."""


def outside_compiled_code(method: Method) -> Method:
    """Decorator: ``torch.compile`` calls the method and does not trace it. torch's compiler, which takes seconds to
    import, is not imported."""
    excluded: list[Callable[..., Any]] = []

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*args, **kwargs)
        if not excluded:
            excluded.append(torch.compiler.disable(method))  # type: ignore[no-untyped-call]
        return excluded[0](*args, **kwargs)

    return call  # type: ignore[return-value]


class ModelHook:
    """Base class of hooks around a module's ``forward``. Unlike torch's hooks, they get keyword arguments, too.

    Attributes:
        no_grad: whether ``forward`` runs without gradients.
    """

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is attached. Returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before ``forward``. Returns its arguments: positional, keyword."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after ``forward``. Returns its result."""
        return output

    def undo_pre_forward(self, module: nn.Module) -> None:
        """Called instead of ``post_forward`` if ``pre_forward`` or ``forward`` has raised an exception."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed. Returns the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one: each method calls the same method of each hook, in order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def undo_pre_forward(self, module: nn.Module) -> None:
        for hook in self.hooks:
            if isinstance(hook, ModelHook):  # one of Accelerate's has no such method
                hook.undo_pre_forward(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach a hook. The module's ``forward`` is replaced by one that calls the hook.

    Args:
        append: whether to run the hook after one that is already attached. If False, it replaces that one.

    Returns:
        The same module.
    """
    present = getattr(module, "_hf_hook", None)
    if append and present is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(*getattr(present, "hooks", (present,)), hook)
    attributes: Any = module
    forward: Any = module._old_forward if present is not None and hasattr(module, "_old_forward") else module.forward
    attributes._old_forward = forward
    module = hook.init_hook(module)
    attributes._hf_hook = hook
    _set_forward(module, functools.update_wrapper(functools.partial(_hooked_forward, module), forward))
    return module


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook = module._hf_hook
    try:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not hook.no_grad):
            output = module._old_forward(*args, **kwargs)
    except BaseException:
        SequentialHook(hook).undo_pre_forward(module)
        raise
    return hook.post_forward(module, output)


def _set_forward(module: Any, forward: Any) -> None:
    # torch.fx writes the code of an edited graph to the class, where an attribute of the instance would hide it.
    holder = type(module) if "GraphModuleImpl" in type(module).__name__ else module
    holder.forward = forward


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook of a module, and restore its original ``forward`` and its weights.

    Args:
        recurse: whether to remove the hooks of all submodules, too.

    Returns:
        The same module.
    """
    attributes: Any = module
    if hasattr(module, "_hf_hook"):
        attributes._hf_hook.detach_hook(module)
        del attributes._hf_hook
    if hasattr(module, "_old_forward"):
        forward = attributes._old_forward
        _set_forward(module, forward)
        if getattr(forward, "__func__", None) is type(module).forward:
            module.__dict__.pop("forward", None)  # the class has it
        del attributes._old_forward
    for name in GUARDED:
        module.__dict__.pop(name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all its submodules."""
    remove_hook_from_module(module, recurse=True)


def is_offloaded(model: nn.Module) -> bool:
    """Whether hooks of hpcaccel or Accelerate give modules of the model their weights only during their ``forward``."""
    hooks = [module.__dict__["_hf_hook"] for module in model.modules() if "_hf_hook" in module.__dict__]
    return any(getattr(one, "offload", False) is True for hook in hooks for one in getattr(hook, "hooks", (hook,)))


class CpuOffload(ModelHook):
    """Keeps a module in CPU memory until its ``forward`` is called, which moves it to the device, where it stays.

    Args:
        execution_device: default: this machine's accelerator, or the CPU.
        prev_module_hook: the hook of the module that ran before; its module is moved back to CPU memory first.
    """

    def __init__(self, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None) -> None:
        from hpcaccel.runtime.offload.device_memory import default_device

        self.prev_module_hook = prev_module_hook
        self.execution_device = default_device() if execution_device is None else torch.device(execution_device)

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    @outside_compiled_code
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        previous = self.prev_module_hook
        if isinstance(previous, UserCpuOffloadHook) and next(previous.model.parameters()).device.type != "cpu":
            previous.offload()
            clear_device_cache()
        if next(module.parameters()).device != self.execution_device:
            module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """A module and its ``CpuOffload`` hook.

    Args:
        model: the module.
        hook: its hook.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the module back to CPU memory."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook from the module."""
        remove_hook_from_module(self.model)
