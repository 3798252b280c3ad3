"""Random generators that are to be alike on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.ranks.process_group import Group

__all__ = ["check_rng_types", "synchronise"]


def check_rng_types(rng_types: Sequence[Any] | None) -> tuple[str, ...]:
    """The kinds' names; they may be given as enums.

    Raises:
        RuntimeMisuse: one that is not known.
    """
    names = tuple(str(getattr(kind, "value", kind)) for kind in rng_types or ())
    for name in names:
        if name != "generator" and name not in _KINDS:
            raise RuntimeMisuse(
                f"rng_types holds {name!r}, which is not known (any of: generator, {', '.join(_KINDS)})"
            )
    return names


def synchronise(names: Sequence[str], group: Group) -> None:
    """Set the global generators so named to the state of rank 0's. A sampler's own generator needs no communication:
    it was set when it was prepared, and all ranks draw from it alike."""
    for name in names:
        if name != "generator" and group.world_size > 1:
            read, write = _KINDS[name]
            write(group.from_main(read()))


def _read_cuda() -> Any:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def _write_cuda(state: Any) -> None:
    if state is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state)


_KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "cuda": (_read_cuda, _write_cuda),
    "numpy": (np.random.get_state, np.random.set_state),
    "python": (random.getstate, random.setstate),
}
