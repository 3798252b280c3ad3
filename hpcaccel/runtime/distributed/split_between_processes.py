"""Splits a list, a tensor, a dict of them or a dataset among the ranks, in order and without communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpcaccel.errors import RuntimeMisuse

__all__ = ["RankSplit", "refuse_unsplittable", "split"]


@dataclass(frozen=True)
class RankSplit:
    """The distribution of ``length`` items among ``ranks``: the first ``length % ranks`` ranks get one extra item."""

    length: int
    ranks: int
    padded: bool

    def real(self, rank: int) -> int:
        """Number of items of a rank, without padding."""
        least, more = divmod(self.length, self.ranks)
        return least + (rank < more)

    def start(self, rank: int) -> int:
        least, more = divmod(self.length, self.ranks)
        return rank * least + min(rank, more)

    @property
    def longest(self) -> int:
        """Number of items that every rank gets with padding."""
        return self.real(0)


def split(value: Any, *, rank: int, ranks: int, apply_padding: bool) -> tuple[Any, RankSplit]:
    """Returns this rank's part of ``value``, and the split. The part of a dataset without ``select`` is a ``Subset``.

    With ``apply_padding`` the last item is repeated so that all parts have the same length; otherwise a part may be
    empty. ``value`` is not modified.

    Raises:
        RuntimeMisuse: ``value`` cannot be split; see ``refuse_unsplittable``.
    """
    plan = RankSplit(_length(value), ranks, apply_padding)
    start, stop = plan.start(rank), plan.start(rank) + plan.real(rank)
    missing = plan.longest - plan.real(rank) if apply_padding and plan.length else 0
    return _part(value, start, stop, missing), plan


def refuse_unsplittable(value: Any) -> None:
    """Check that ``value`` can be split.

    Raises:
        RuntimeMisuse: ``value`` is not a list, a tuple, a tensor with at least one dimension, a dataset with a length,
            or a dict of these with equal lengths.
    """
    _length(value)


def _length(value: Any) -> int:
    if isinstance(value, Mapping):
        lengths = {key: _length(item) for key, item in value.items()}
        if not lengths:
            raise RuntimeMisuse("split_between_processes cannot split an empty dict")
        if len(set(lengths.values())) != 1:
            raise RuntimeMisuse(
                f"split_between_processes: all values of a dict must have the same length (lengths: {lengths})"
            )
        return next(iter(lengths.values()))
    scalar = isinstance(value, torch.Tensor) and value.ndim == 0
    if isinstance(value, str | bytes) or scalar or not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        raise RuntimeMisuse(
            f"split_between_processes cannot split {type(value).__name__} {value!r:.100}: it takes a list, a tuple, a "
            "tensor with at least one dimension, a dict of these, or a dataset with a length"
        )
    return len(value)


def _part(value: Any, start: int, stop: int, missing: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _part(item, start, stop, missing) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        part = value[start:stop]
        return torch.cat([part, value[-1:].expand(missing, *value.shape[1:])]) if missing else part
    if isinstance(value, Sequence):
        return _part_of_sequence(value, start, stop, missing)
    indices = [*range(start, stop), *[len(value) - 1] * missing]
    if hasattr(value, "select"):
        return value.select(indices)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return value[indices]
    return torch.utils.data.Subset(value, indices)


def _part_of_sequence(value: Sequence[Any], start: int, stop: int, missing: int) -> Any:
    part = value[start:stop]
    if not missing:
        return part
    filled = [*part, *[value[-1]] * missing]
    return tuple(filled) if isinstance(part, tuple) else filled
