"""Hooks around a module's ``forward``: attaching and removing them, and the hooks that move or cast a whole module.

A hook is stored in the module's attribute ``_hf_hook``, and the original ``forward`` in ``_old_forward``, as in
Accelerate: transformers, diffusers and PEFT look for these names.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from hpcaccel.runtime.compat.out_of_memory import clear_device_cache
from hpcaccel.runtime.distributed.collectives.nested_ops import send_to_device

__all__ = [
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_layerwise_casting_hooks",
    "outside_compiled_code",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]

Method = TypeVar("Method", bound=Callable[..., Any])

GUARDED = ("to", "cpu", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "neuron")
"""Methods that ``dispatch_model`` replaces in the model's instance, because they would move its weights."""

SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING: tuple[type[nn.Module], ...] = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
)  # fmt: skip
"""Layers that ``attach_layerwise_casting_hooks`` casts."""


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
    """Several hooks: each method calls theirs, in order."""

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


class LayerwiseCastingHook(ModelHook):
    """Stores the weights of a module in one dtype, and computes in another.

    Args:
        storage_dtype: dtype of the weights outside of ``forward``, unless it has raised an error.
        compute_dtype: dtype of the weights inside ``forward``.
        non_blocking: whether the casts are asynchronous, where the device can do this.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @outside_compiled_code
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @outside_compiled_code
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Attach a ``LayerwiseCastingHook`` to each linear and convolutional layer of a model.

    Args:
        skip_modules_pattern: regular expressions; a module whose name contains a match, and all modules inside it, keep
            their dtype.
        skip_modules_classes: modules of these classes, and all modules inside them, keep their dtype.
        non_blocking: whether the casts are asynchronous, where the device can do this.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())

    def attach(part: nn.Module, name: str) -> None:
        if isinstance(part, skip_modules_classes or ()) or any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(part, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            add_hook_to_module(part, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
            return
        for child_name, child in part.named_children():
            attach(child, f"{name}.{child_name}" if name else child_name)

    attach(module, "")
