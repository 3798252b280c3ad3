"""``torch.compile`` for prepared models: for the whole model after wrapping, or for its repeated blocks before
wrapping."""

from __future__ import annotations

import signal
import sys
from typing import Any

from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.child_signals import SIGNALS
from hpcaccel.runtime.parallel.wrapping import repeated_blocks

__all__ = ["compile_blocks", "compile_whole", "hold_signals", "is_compiled", "options_of", "strip"]


def options_of(wish: Any, *, setting: bool = False) -> dict[str, Any] | None:
    """Arguments of ``torch.compile``, plus ``regional`` (compile repeated blocks one by one); None to compile nothing.

    Args:
        wish: a ``TorchDynamoPlugin``, the name of a backend, or None.
        setting: whether the spec enables compilation; used if ``wish`` is None.

    Raises:
        RuntimeMisuse: torch has no such backend.
    """
    if wish is None:
        return {"regional": False} if setting else None
    if isinstance(wish, str):
        backend, options = str(wish), {}
    else:
        backend = str(wish.backend or "no")
        names = ("mode", "fullgraph", "dynamic", "options")
        options = {name: getattr(wish, name) for name in names if getattr(wish, name) is not None}
        if wish.disable:
            options["disable"] = True
        if options.get("mode") == "default":
            del options["mode"]
        options["regional"] = bool(wish.use_regional_compilation)
    backend = backend.lower()
    if backend == "no":
        return None
    _check(backend)
    return {"regional": False, "backend": backend, **options}


def _check(backend: str) -> None:
    """Check that torch has this backend.

    Raises:
        RuntimeMisuse: torch has no such backend.
    """
    if backend in ("inductor", "eager", "aot_eager"):
        return  # avoids importing the compiler, which takes a second
    from torch._dynamo import list_backends

    known = list_backends(exclude_tags=())
    if backend not in known:
        raise RuntimeMisuse(f"unknown dynamo_backend {backend!r} (allowed: no, {', '.join(known)})")


def compile_whole(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Compile the model as a whole; returns torch's wrapper around it."""
    import torch

    arguments = {name: value for name, value in options.items() if name != "regional"}
    compiled: Any = torch.compile(model, **arguments)
    assert isinstance(compiled, nn.Module)
    return compiled


def compile_blocks(model: nn.Module, options: dict[str, Any]) -> bool:
    """Compile the repeated blocks in place; equal blocks can share a compilation. Returns whether there are any."""
    found = repeated_blocks(model)
    arguments = {name: value for name, value in options.items() if name != "regional"}
    for block in found:
        block.compile(**arguments)
    return bool(found)


def is_compiled(model: Any) -> bool:
    """Whether ``model`` is a wrapper of ``torch.compile``; does not import the compiler."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return module is not None and isinstance(model, module.OptimizedModule)


def strip(model: nn.Module) -> tuple[nn.Module, Any]:
    """Returns the module inside ``torch.compile``'s wrapper, and a function that wraps another module in the same way.

    Returns ``model`` and None if ``model`` is not such a wrapper.
    """
    if not is_compiled(model):
        return model, None
    compiled: Any = model
    return compiled._orig_mod, compiled.dynamo_ctx


def hold_signals() -> None:
    """Register torch callbacks that block the stop signals that have handlers, during each compilation.

    Has no effect if torch's compiler is not imported yet.

    Compilers are separate processes, and a signal sent to all processes of a job would kill them: the training would
    fail instead of stopping, or continue with code that does not use SIMD instructions. The compilers inherit the
    signal mask. The rank handles a pending signal after the compilation.
    """
    callbacks: Any = getattr(sys.modules.get("torch._dynamo"), "callback", None)
    if callbacks is None or _hold in callbacks.callback_handler.start_callbacks:
        return  # the compiler is not imported, or the callbacks are registered
    callbacks.callback_handler.register_start_callback(_hold)
    callbacks.callback_handler.register_end_callback(_release)


_held: list[set[signal.Signals]] = []


def _hold(*_: Any) -> None:
    # Only signals with a handler: a signal with the default action must end the program at once.
    handled = {number for number in SIGNALS if callable(signal.getsignal(number))}
    _held.append(handled - set(signal.pthread_sigmask(signal.SIG_BLOCK, handled)))


def _release(*_: Any) -> None:
    if _held:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _held.pop())
