"""``--grid key=a,b,c``: every combination of some values, one task of an array each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from hpcaccel.errors import SpecError
from hpcaccel.spec.overrides import full_path
from hpcaccel.spec.yaml12 import KeyPath

__all__ = ["grid", "grid_size"]


def grid(axes: Sequence[str]) -> list[list[str]]:
    """All combinations of ``key=a,b,c`` axes, each a list of overrides; the last axis varies fastest.

    A comma inside brackets or quotes does not separate.

    Raises:
        SpecError: an axis has no ``=``, an empty value, or a key that another axis has.
    """
    return [list(combination) for combination in itertools.product(*_choices(axes))]


def grid_size(axes: Sequence[str]) -> int:
    """How many combinations there are; raises as :func:`grid`, and makes none of them."""
    return math.prod(len(values) for values in _choices(axes))


def _choices(axes: Sequence[str]) -> list[list[str]]:
    keys: dict[KeyPath, str] = {}
    choices = []
    for axis in axes:
        try:
            key, values = _axis(axis, keys)
        except SpecError as error:
            raise SpecError(f"command line: --grid {axis}: {error}") from None
        choices.append([f"{key}={value}" for value in values])
    return choices


def _axis(axis: str, keys: dict[KeyPath, str]) -> tuple[str, list[str]]:
    key, equals, text = axis.partition("=")
    if not equals or not key:
        raise SpecError("write key=a,b,c, such as args.lr=1e-3,3e-4")
    path = full_path(key)
    if path in keys:
        raise SpecError(f"{keys[path]} is an axis already")
    keys[path] = key
    values = _split(text)
    if "" in values:
        raise SpecError("a value is empty (write '' for an empty text)")
    return key, values


def _split(values: str) -> list[str]:
    parts, start, depth, quote = [], 0, 0, ""
    for index, character in enumerate(values):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(values[start:index])
            start = index + 1
    return [*parts, values[start:]]
