"""Dataclasses from JSON: what ``dataclasses.asdict`` has made, read back by the types of the fields."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["from_json"]

T = TypeVar("T")


def from_json(kind: type[T], value: Any) -> T:
    """Build a ``kind`` (a dataclass) from its JSON. Unknown keys are ignored; fields that the
    JSON lacks get their default, or None.

    Raises:
        ValueError: ``value`` is not a JSON object.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{kind.__name__} must be a JSON object, not {type(value).__name__}")
    hints = _hints(kind)
    made = {}
    for one in fields(kind):  # type: ignore[arg-type]
        if not one.init:
            continue
        if one.name in value:
            made[one.name] = _read(hints[one.name], value[one.name])
        elif one.default is MISSING and one.default_factory is MISSING:
            made[one.name] = None
    return kind(**made)


_HINTS: dict[Any, dict[str, Any]] = {}


def _hints(kind: Any) -> dict[str, Any]:
    """The types of the fields, resolved once."""
    if kind not in _HINTS:
        _HINTS[kind] = get_type_hints(kind)
    return _HINTS[kind]


def _read(hint: Any, value: Any) -> Any:
    if value is None or hint is Any:
        return value
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _read(_member(inner, value), value)
    if origin is list and isinstance(value, list):
        return [_read(inner[0], item) for item in value]
    if origin is tuple and isinstance(value, list):
        kinds = [inner[0]] * len(value) if inner[-1:] == (Ellipsis,) else [*inner, *[Any] * len(value)]
        return tuple(_read(one, item) for one, item in zip(kinds, value, strict=False))
    if origin is dict and isinstance(value, dict):
        return {_key(inner[0], key): _read(inner[1], item) for key, item in value.items()}
    if origin is Literal:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and is_dataclass(hint) and isinstance(value, dict):
        return from_json(hint, value)
    return value


def _member(members: tuple[Any, ...], value: Any) -> Any:
    """The member of a union that fits: a dataclass for an object, a list or a tuple for an array."""
    for one in members:
        origin = get_origin(one) or one
        if isinstance(value, dict) and (origin is dict or is_dataclass(origin)):
            return one
        if isinstance(value, list) and origin in (list, tuple):
            return one
        if isinstance(origin, type) and type(value) is origin:
            return one
    return float if float in members else Any


def _key(kind: Any, key: str) -> Any:
    """JSON has only texts as keys."""
    return int(key) if kind is int else key
