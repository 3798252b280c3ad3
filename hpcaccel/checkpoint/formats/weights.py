"""A model's tensors by name, read lazily, and the search for a model in another program's checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from hpcaccel.core.formatting import shortened
from hpcaccel.errors import CheckpointError

__all__ = ["Weight", "WeightSource", "cast", "model_in", "plain_names"]

_USUAL = ("model", "module", "state_dict", "model_state_dict")
"""Usual keys of the model in a saved dict."""
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts of a name that torch.compile, FSDP and activation checkpointing add."""
_SHOWN = 12
"""Maximum number of keys in an error message."""


@dataclass(eq=False, frozen=True)
class Weight:
    """A tensor that is read on demand. ``read`` returns a contiguous CPU tensor; ``ties`` are its other names."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    ties: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WeightSource:
    """A model to convert. ``extra`` holds its non-tensor entries; ``notes`` are messages about what is left out."""

    kind: str
    weights: list[Weight]
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


def cast(weights: Iterable[Weight], dtype: torch.dtype) -> list[Weight]:
    """Cast floating-point weights to ``dtype``; other weights are unchanged."""

    def read(weight: Weight) -> torch.Tensor:
        return weight.read().to(dtype)

    return [
        replace(weight, dtype=dtype, read=partial(read, weight))
        if weight.dtype.is_floating_point and weight.dtype != dtype
        else weight
        for weight in weights
    ]


def model_in(saved: Mapping[Any, Any], part: str | None, where: object) -> dict[str, Any]:
    """The model in saved nested dicts, as a flat dict with dotted names.

    Args:
        part: keys that lead to the model, separated by dots. None selects ``saved`` itself if it is flat, else its
            entry ``model``, ``module``, ``state_dict`` or ``model_state_dict``.
        where: the file or directory, for error messages.

    Raises:
        CheckpointError: there is no dict or list at ``part``; or ``part`` is None, and ``saved`` has none or several of
            these four entries.
    """
    if part is not None:
        return _flat(_at(saved, part, where))
    if not any(isinstance(value, Mapping | list) for value in saved.values()):
        return _flat(saved)
    usual = [key for key in _USUAL if isinstance(saved.get(key), Mapping)]
    if len(usual) == 1:
        return _flat(saved[usual[0]])
    keys = shortened(list(saved), _SHOWN)
    raise CheckpointError(f"it is unclear which entry of {where} is the model (keys: {keys}). Select it with --part")


def _at(saved: Mapping[Any, Any], part: str, where: object, *, parents: str = "") -> Mapping[Any, Any]:
    """The entry at ``part``. Keys may contain dots: the longest matching key is used. A list has indices as keys.

    Args:
        parents: the keys that lead to ``saved``, each followed by a dot.
    """
    if part == "":
        return saved
    keys = part.split(".")
    for count in range(len(keys), 0, -1):
        key = ".".join(keys[:count])
        inner = saved.get(key)
        if isinstance(inner, list):
            inner = {str(number): item for number, item in enumerate(inner)}
        if isinstance(inner, Mapping):
            return _at(inner, ".".join(keys[count:]), where, parents=f"{parents}{key}.")
    place = f"{parents[:-1]} of {where}" if parents else where
    raise CheckpointError(
        f"--part {parents + part!r}: {part!r} is not a nested dict or list in {place} "
        f"(keys there: {shortened(list(saved), _SHOWN)})"
    )


def _flat(saved: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in saved.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": item for name, item in _flat(value).items()}
        else:
            found[str(key)] = value
    return found


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name to the name without the prefixes of DDP, FSDP, torch.compile and activation checkpointing."""
    bare = {name: _WRAPPERS.sub("", name) for name in names}
    if bare and all(name.startswith("module.") for name in bare.values()):
        bare = {name: short.removeprefix("module.") for name, short in bare.items()}
    return bare
