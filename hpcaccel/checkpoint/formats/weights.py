"""A model's tensors by name, none of them read yet; and where in a foreign checkpoint they are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from hpcaccel.errors import CheckpointError

__all__ = ["Source", "Weight", "cast", "model_in", "plain_names"]

_USUAL = ("model", "module", "state_dict", "model_state_dict")
"""What people call the model in a dict that they save."""
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_SHOWN = 12


@dataclass(eq=False, frozen=True)
class Weight:
    """A tensor that is read when it is needed, contiguous and on the CPU. ``ties`` are its other names."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    ties: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Source:
    """What there is to convert. ``extra`` holds entries that are no tensors, ``notes`` say what is left out."""

    kind: str
    weights: list[Weight]
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


def cast(weights: Iterable[Weight], dtype: torch.dtype) -> list[Weight]:
    """Floating-point ones in another dtype, the others as they are."""

    def read(weight: Weight) -> torch.Tensor:
        return weight.read().to(dtype)

    return [
        replace(weight, dtype=dtype, read=partial(read, weight))
        if weight.dtype.is_floating_point and weight.dtype != dtype
        else weight
        for weight in weights
    ]


def model_in(saved: Mapping[Any, Any], part: str | None, where: object) -> dict[str, Any]:
    """The model in nested dicts that somebody has saved, as one flat dict.

    Args:
        part: keys on the way to it, with dots between them; None: find it.

    Raises:
        CheckpointError: it is not there, or cannot be told from the rest.
    """
    if part is not None:
        return _flat(_at(saved, part, where))
    if not any(isinstance(value, Mapping | list) for value in saved.values()):
        return _flat(saved)
    usual = [key for key in _USUAL if isinstance(saved.get(key), Mapping)]
    if len(usual) == 1:
        return _flat(saved[usual[0]])
    keys = ", ".join(map(str, list(saved)[:_SHOWN]))
    raise CheckpointError(f"{where} holds more than a model: {keys}. Say which of these it is with --part")


def _at(saved: Mapping[Any, Any], part: str, where: object) -> Mapping[Any, Any]:
    """Keys may hold dots themselves: the longest that fits is taken. Items of lists have their numbers."""
    if part == "":
        return saved
    words = part.split(".")
    for count in range(len(words), 0, -1):
        key = ".".join(words[:count])
        inner = saved.get(key)
        if isinstance(inner, list):
            inner = {str(number): item for number, item in enumerate(inner)}
        if isinstance(inner, Mapping):
            return _at(inner, ".".join(words[count:]), where)
    keys = ", ".join(map(str, list(saved)[:_SHOWN]))
    raise CheckpointError(f"--part {part!r} is not in {where} (there: {keys})")


def _flat(saved: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in saved.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": item for name, item in _flat(value).items()}
        else:
            found[str(key)] = value
    return found


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without what DDP, FSDP, torch.compile and activation checkpointing have put into it."""
    bare = {name: _WRAPPERS.sub("", name) for name in names}
    if bare and all(name.startswith("module.") for name in bare.values()):
        bare = {name: short.removeprefix("module.") for name, short in bare.items()}
    return bare
