"""A module's forward with something around it, on this one instance; names, class and parameters stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

__all__ = ["Around", "put_around", "take_off"]


class Around:
    """Stands in for the forward of one module. Can be copied and pickled along with its module."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Whose signature this has, for those who inspect ``model.forward``."""
        return self.inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


A = TypeVar("A", bound=Around)


def put_around(module: nn.Module, make: Callable[[Callable[..., Any]], A]) -> A:
    """Replace the forward of ``module`` by what ``make`` makes of it."""
    around = make(module.forward)
    module.forward = around
    return around


def take_off(module: nn.Module, kind: type[Around]) -> None:
    """Undo ``put_around`` for all of ``kind``; others that lie around them stay."""
    outer: Around | None = None
    current: Any = module.__dict__.get("forward")
    while isinstance(current, Around):
        if not isinstance(current, kind):
            outer, current = current, current.inner
            continue
        current = current.inner
        if outer is not None:
            outer.inner = current
        elif getattr(current, "__func__", None) is type(module).forward:
            del module.forward  # the class's own again
            return
        else:
            module.forward = current
