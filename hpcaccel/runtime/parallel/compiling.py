"""``torch.compile`` for prepared models: after they are wrapped, so that what the wrappers do is compiled around, not
into them."""

from __future__ import annotations

import signal
import sys
from typing import Any

from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallel.wrapping import repeated_blocks
from hpcaccel.runtime.training.stop_agreement import SIGNALS

__all__ = ["compile_blocks", "compile_whole", "hold_signals", "is_compiled", "options_of", "strip"]


def options_of(wish: Any, *, setting: bool = False) -> dict[str, Any] | None:
    """What ``torch.compile`` is told; None: not to compile. ``regional`` is taken out by whoever compiles.

    Args:
        wish: a ``TorchDynamoPlugin``, the name of a backend, or None.
        setting: whether the spec asks to compile.
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
    """
    Raises:
        RuntimeMisuse: torch has no such backend.
    """
    if backend in ("inductor", "eager", "aot_eager"):
        return  # without the second that importing the compiler takes
    from torch._dynamo import list_backends

    known = list_backends(exclude_tags=())
    if backend not in known:
        raise RuntimeMisuse(f"dynamo_backend={backend!r} is not known (one of: no, {', '.join(known)})")


def compile_whole(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """The model compiled in one piece; torch's wrapper around it comes back."""
    import torch

    told = {name: value for name, value in options.items() if name != "regional"}
    compiled: Any = torch.compile(model, **told)
    assert isinstance(compiled, nn.Module)
    return compiled


def compile_blocks(model: nn.Module, options: dict[str, Any]) -> bool:
    """Compile the repeated blocks in place, each on its own: one compilation serves all. False: there are none."""
    found = repeated_blocks(model)
    told = {name: value for name, value in options.items() if name != "regional"}
    for block in found:
        block.compile(**told)
    return bool(found)


def is_compiled(model: Any) -> bool:
    """Whether ``model`` is what ``torch.compile`` gave back. Nobody can have that before the compiler is imported."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return module is not None and isinstance(model, module.OptimizedModule)


def strip(model: nn.Module) -> tuple[nn.Module, Any]:
    """The module inside ``torch.compile``'s wrapper, and what makes such a wrapper of another module; None where there
    is no wrapper."""
    if not is_compiled(model):
        return model, None
    compiled: Any = model
    return compiled._orig_mod, compiled.dynamo_ctx


def hold_signals() -> None:
    """From now on, while torch compiles, the signals that stop a training are held back.

    Compilers are processes of their own, and a signal that is sent to all processes of a job would end them: the
    training would fail instead of stopping, or go on with other instructions than those of this processor. They
    inherit what is held back; the rank hears the signal when it has compiled.
    """
    callbacks: Any = getattr(sys.modules.get("torch._dynamo"), "callback", None)
    if callbacks is None or _hold in callbacks.callback_handler.start_callbacks:
        return  # nothing is to be compiled, as far as anybody can know
    callbacks.callback_handler.register_start_callback(_hold)
    callbacks.callback_handler.register_end_callback(_release)


_held: list[set[signal.Signals]] = []


def _hold(*_: Any) -> None:
    # Only what is listened to: a program with the signals' defaults is to end by them at once.
    heard = {number for number in SIGNALS if callable(signal.getsignal(number))}
    _held.append(heard - set(signal.pthread_sigmask(signal.SIG_BLOCK, heard)))


def _release(*_: Any) -> None:
    if _held:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _held.pop())
