"""Bringing together what each rank has made of its part: tensors, and strings or other objects, in rank order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hpcaccel.runtime import ops
from hpcaccel.runtime.objects import from_all
from hpcaccel.runtime.process_group import Group
from hpcaccel.runtime.splitting import Split

__all__ = ["collect"]


def collect(value: Any, group: Group, split: Split | None = None) -> Any:
    """All ranks' values, in rank order, on every rank.

    Tensors, also nested in lists, tuples and dicts, are concatenated along dimension 0. A list or a tuple that holds no
    tensor is one of objects, and the ranks' lists become one; anything else becomes a list with one item a rank.

    Args:
        split: how the work was shared out. What has as many items as each padded part is without the padding then;
            anything else, say a statistic, stays whole.
    """
    if isinstance(value, torch.Tensor):
        return _without_padding(ops.gather(value, group), value, split)
    if isinstance(value, Mapping):
        return {key: collect(item, group, split) for key, item in value.items()}
    if isinstance(value, list | tuple) and _holds_tensor(value):
        items = [collect(item, group, split) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return _objects(value, group, split)


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _without_padding(gathered: torch.Tensor, own: torch.Tensor, split: Split | None) -> torch.Tensor:
    if split is None or not split.padded or own.ndim == 0 or len(own) != split.longest:
        return gathered
    starts = range(0, len(gathered), split.longest)
    return torch.cat([gathered[start : start + split.real(rank)] for rank, start in enumerate(starts)])


def _objects(value: Any, group: Group, split: Split | None) -> Any:
    is_list = isinstance(value, list | tuple)
    if split is not None and split.padded and is_list and len(value) == split.longest:
        value = value[: split.real(group.rank)]
    gathered: list[Any] = [value]
    if group.exchange is not None:
        group.refuse_if_left()
        gathered = from_all(group.exchange, value, what="gather")
    if not is_list:
        return gathered
    together = [item for part in gathered for item in part]
    return tuple(together) if isinstance(value, tuple) else together
