"""Wrappers around the forward of a module instance. The module keeps its class, its parameters and their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn
from torch.utils.checkpoint import checkpoint

from hpcaccel.errors import RuntimeMisuse

__all__ = ["ForwardWrapper", "LastingRecomputedForward", "RecomputedForward", "put_around", "recompute", "take_off"]


class ForwardWrapper:
    """Replaces the forward of one module. A copy or pickle of the module includes the wrapper."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The wrapped forward, whose signature ``inspect`` reports for ``model.forward``."""
        return self.inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


A = TypeVar("A", bound=ForwardWrapper)


def put_around(module: nn.Module, make: Callable[[Callable[..., Any]], A]) -> A:
    """Replace the forward of ``module`` with ``make(forward)``, and return the new forward."""
    around = make(module.forward)
    module.forward = around
    return around


def take_off(module: nn.Module, kind: type[ForwardWrapper], *, but: tuple[type[ForwardWrapper], ...] = ()) -> None:
    """Remove all wrappers of class ``kind`` from the forward of ``module``, except those of a class in ``but``; other
    wrappers remain."""
    outer: ForwardWrapper | None = None
    current: Any = module.__dict__.get("forward")
    while isinstance(current, ForwardWrapper):
        if not isinstance(current, kind) or isinstance(current, but):
            outer, current = current, current.inner
            continue
        current = current.inner
        if outer is not None:
            outer.inner = current
        elif getattr(current, "__func__", None) is type(module).forward:
            del module.forward  # restores the class's forward
            return
        else:
            module.forward = current


class RecomputedForward(ForwardWrapper):
    """A forward with activation checkpointing: activations are recomputed in the backward pass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


class LastingRecomputedForward(RecomputedForward):
    """The same, set by the script: ``prepare`` does not remove it."""


def recompute(blocks: Iterable[nn.Module], kind: type[RecomputedForward] = RecomputedForward) -> None:
    """Enable activation checkpointing for these blocks. Parameters keep their names.

    Raises:
        RuntimeMisuse: there are no blocks.
    """
    found = list(blocks)
    if not found:
        raise RuntimeMisuse(
            "activation checkpointing found no blocks in the model. List the classes of its blocks in fsdp.wrap, or "
            "call torch.utils.checkpoint in the model itself"
        )
    for block in found:
        take_off(block, RecomputedForward)
        put_around(block, kind)
