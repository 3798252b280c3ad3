"""The collective functions of ``accelerate.utils``, on the current process group."""

from __future__ import annotations

from typing import Any

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.collectives import gathering, padding
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.distributed.world import World

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "copy_tensor_to_devices",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "wait_for_everyone",
]


def gather(tensor: Any) -> Any:
    """Concatenate nested tensors of all ranks; see ``Accelerator.gather``."""
    return gathering.gather(tensor, _group())


def gather_object(object: Any) -> Any:
    """Concatenate all ranks' lists, tuples or sets in rank order into one list, on every rank. A tensor contributes its
    rows; any other value counts as one item. A single process gets its own value back.

    Raises:
        RuntimeMisuse: some ranks do not take part.
    """
    return gathering.gather_object(object, _group())


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Reduce nested tensors of all ranks; see ``Accelerator.reduce``, but the default reduction is the mean."""
    return gathering.reduce(tensor, _group(), reduction=reduction, scale=scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad nested tensors to the greatest length on any rank; see ``Accelerator.pad_across_processes``."""
    return padding.pad_across_processes(tensor, _group(), dim=dim, pad_index=pad_index, pad_first=pad_first)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite nested tensors with those of rank ``from_process``, and return them.

    Args:
        tensor: tensors, in lists, tuples and dicts of any depth, of the same shapes and types on every rank.
        from_process: the rank whose values all ranks get.

    Raises:
        RuntimeMisuse: ``from_process`` is not a rank; a leaf is not a tensor; types or shapes differ among the ranks,
            or some ranks do not take part.
    """
    return gathering.broadcast(tensor, _group(), from_process=from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite the items of a list with those of rank ``from_process``, and return the same list.

    Args:
        object_list: a list of picklable objects, of the same length on every rank.
        from_process: the rank whose items all ranks get.

    Raises:
        RuntimeMisuse: ``from_process`` is not a rank; the lists differ in length, or some ranks do not take part.
    """
    return gathering.broadcast_object_list(object_list, _group(), from_process=from_process)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a tensor to every rank's device. Exactly one rank passes the tensor; the other ranks pass None.

    Raises:
        RuntimeMisuse: not exactly one rank passes a tensor.
    """
    group = _group()
    mine = None if tensor is None else tensor.detach().cpu()
    parts = [mine]
    if group.exchange is not None:
        parts = group.exchange.objects_from_all(mine, what="copy_tensor_to_devices")
    found = [part for part in parts if part is not None]
    if len(found) != 1:
        raise RuntimeMisuse(
            f"copy_tensor_to_devices needs a tensor from exactly one rank, but {len(found)} ranks passed one"
        )
    return found[0].to(group.device)


def wait_for_everyone() -> None:
    """Wait for all ranks.

    Raises:
        RuntimeMisuse: some ranks do not take part.
    """
    _group().barrier()


def _group() -> RankGroup:
    group = World.current().group
    group.refuse_if_left()
    return group
