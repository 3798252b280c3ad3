"""Attributes that Accelerate's classes have and ours do not: reading one says why, ``hasattr`` says no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["lacks"]

Class = TypeVar("Class", bound=type)


class _Lacking:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        from hpcaccel.runtime.compat.unsupported import why

        raise AttributeError(f"{owner.__name__}.{self._name} is not here. {why(self._name)}")


def lacks(names: str) -> Callable[[Class], Class]:
    """A class with these attributes (names with spaces between), whose reasons stand in ``unsupported``."""

    def mark(kind: Class) -> Class:
        for name in names.split():
            setattr(kind, name, _Lacking(name))
        return kind

    return mark
