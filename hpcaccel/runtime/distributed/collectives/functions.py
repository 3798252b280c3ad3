"""``accelerate.utils``'s functions that all ranks call, for the ranks that this process belongs to."""

from __future__ import annotations

from typing import Any

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.collectives import ops
from hpcaccel.runtime.distributed.collectives.objects import from_all
from hpcaccel.runtime.distributed.process_group import Group
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
    """See ``Accelerator.gather``."""
    return ops.gather(tensor, _group())


def gather_object(object: Any) -> Any:
    """The items of all ranks' lists in rank order, on every rank; of what is no list, one item a rank, and of a tensor
    its rows. A lone rank gets its own back."""
    return ops.gather_object(object, _group())


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """See ``Accelerator.reduce``; the mean unless another reduction is named."""
    return ops.reduce(tensor, _group(), reduction=reduction, scale=scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """See ``Accelerator.pad_across_processes``."""
    return ops.pad_across_processes(tensor, _group(), dim=dim, pad_index=pad_index, pad_first=pad_first)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite nested tensors with those of one rank; they come back.

    Raises:
        RuntimeMisuse: no such rank; types or shapes differ among the ranks, or some do not come.
    """
    return ops.broadcast(tensor, _group(), from_process=from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite the items of a list with those of one rank's; the same list comes back.

    Raises:
        RuntimeMisuse: no such rank; the lists are not equally long, or some ranks do not come.
    """
    return ops.broadcast_object_list(object_list, _group(), from_process=from_process)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor of the only rank that has one, which the others give None for, on each rank's device.

    Raises:
        RuntimeMisuse: not exactly one rank has one.
    """
    group = _group()
    mine = None if tensor is None else tensor.detach().cpu()
    parts = [mine] if group.exchange is None else from_all(group.exchange, mine, what="copy_tensor_to_devices")
    found = [part for part in parts if part is not None]
    if len(found) != 1:
        raise RuntimeMisuse(f"copy_tensor_to_devices copies the tensor of one rank, and {len(found)} ranks have one")
    return found[0].to(group.device)


def wait_for_everyone() -> None:
    """Wait for all ranks.

    Raises:
        RuntimeMisuse: some do not come.
    """
    _group().barrier()


def _group() -> Group:
    group = World.current().group
    group.refuse_if_left()
    return group
