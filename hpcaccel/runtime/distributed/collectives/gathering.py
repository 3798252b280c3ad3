"""All ranks' tensors on every rank, and the sums of them.

Tensors on the CPU travel over the group of the script's own calls, those of GPUs over the default group. The former are
compared among the ranks before anything is mixed, the latter in debug mode and the first few times of each program:
there it would cost more than the collective itself, and those who call it under ``if is_main_process`` do so from the
first time on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.collectives.exchange import INLINE_BYTES, Exchange
from hpcaccel.runtime.distributed.collectives.nested_tensors import leaves, recursively_apply, refilled
from hpcaccel.runtime.distributed.collectives.objects import refuse_unknown_rank
from hpcaccel.runtime.distributed.collectives.raw_bytes import bytes_of, joined, tensor_of
from hpcaccel.runtime.distributed.collectives.structure_text import form_of
from hpcaccel.runtime.parallel.dtensors import full, is_dtensor

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.process_group import Group

__all__ = ["broadcast", "gather", "reduce"]

CHECKED_CALLS = 16
"""So many calls with GPU tensors are compared among the ranks even outside of debug mode."""
REDUCTIONS = ("sum", "mean", "max", "none")
_SUMMED_AS = {torch.bfloat16: torch.float32, torch.int16: torch.int32}
"""Where gloo cannot add up the type itself."""


def gather(value: Any, group: Group) -> Any:
    """All ranks' tensors, concatenated along dimension 0 in rank order, on every rank; detached.

    Tensors of no dimension become one-dimensional. A DTensor, which belongs to all ranks, becomes whole, once. A lone
    rank gets back its own; what is no tensor is left to it as it is.

    Raises:
        NotATensor: something else than tensors.
        RuntimeMisuse: types, shapes or containers differ among the ranks, or some ranks do not come.
    """
    if group.exchange is None:
        return recursively_apply(lambda tensor: _rows(plain_of(tensor)), value)
    tensors = leaves(value, "gather")
    spread = [not is_dtensor(tensor) for tensor in tensors]
    ready = [_rows(plain_of(tensor)) for tensor in tensors]
    gathered = iter(gather_all([tensor for tensor, own in zip(ready, spread, strict=True) if own], group, value))
    return refilled(value, [next(gathered) if own else t for t, own in zip(ready, spread, strict=True)])


def gather_all(tensors: Sequence[torch.Tensor], group: Group, value: Any, what: str = "gather") -> list[torch.Tensor]:
    """``gather`` of tensors with at least one dimension; ``value`` is what they were found in."""
    exchange = group.exchange
    assert exchange is not None
    ours, theirs = _by_device(tensors, group)
    results: list[torch.Tensor | None] = [None] * len(tensors)
    if ours or is_checked(exchange, group):
        cpu = [tensors[index].cpu() for index in ours]
        answers = exchange.call(what, form=form_of(value), data=joined(cpu) if cpu else None)
        start = 0
        for index, tensor in zip(ours, cpu, strict=True):
            end = start + tensor.nbytes
            data = answers.table[:, start:end].reshape(-1)
            whole = tensor_of(data, tensor.dtype, _stacked(tensor, group.world_size))
            results[index], start = whole.to(tensors[index].device), end
    for index in theirs:
        results[index] = _gather_on_device(tensors[index], group.world_size)
    return [tensor for tensor in results if tensor is not None]


def _gather_on_device(tensor: torch.Tensor, world_size: int) -> torch.Tensor:
    data = bytes_of(tensor)
    box = data.new_empty(world_size * data.numel())
    if data.numel():
        # torch renamed it in 2.13, and warns of the older name.
        into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        into(box, data)
    return tensor_of(box, tensor.dtype, _stacked(tensor, world_size))


def _stacked(tensor: torch.Tensor, world_size: int) -> tuple[int, ...]:
    return (world_size * tensor.shape[0], *tensor.shape[1:])


def reduce(value: Any, group: Group, *, reduction: str = "sum", scale: float = 1.0) -> Any:
    """The sum, mean or largest of all ranks' tensors, element by element, times ``scale``, on every rank.

    The mean of integers is a float. ``none`` gives back this rank's own. Sums are in rank order where the tensors are
    small, so that they do not depend on the number of nodes.

    Raises:
        NotATensor: something else than tensors.
        RuntimeMisuse: an unknown reduction; types, shapes or containers differ, or some ranks do not come.
    """
    if reduction not in REDUCTIONS:
        raise RuntimeMisuse(f"reduction={reduction!r} is not known (one of: {', '.join(REDUCTIONS)})")
    tensors = [plain_of(tensor) for tensor in leaves(value, "reduce")]
    if group.exchange is None or reduction == "none":
        results = [tensor.clone() for tensor in tensors]
    else:
        results = _reduce_all(tensors, group, value, largest=reduction == "max")
    if reduction == "mean":
        results = [tensor / group.world_size for tensor in results]
    if scale != 1.0:
        results = [tensor * scale for tensor in results]
    return refilled(value, results)


def _reduce_all(tensors: Sequence[torch.Tensor], group: Group, value: Any, *, largest: bool) -> list[torch.Tensor]:
    exchange = group.exchange
    assert exchange is not None
    ours, theirs = _by_device(tensors, group)
    results = [tensor.clone() for tensor in tensors]

    def wait(work: Any) -> None:
        exchange.wait(work, "reduce")

    if ours or is_checked(exchange, group):
        cpu = [tensors[index].cpu() for index in ours]
        small = sum(tensor.nbytes for tensor in cpu) <= INLINE_BYTES
        answers = exchange.call(
            "reduce",
            form=f"{'the largest of ' if largest else ''}{form_of(value)}",
            data=joined(cpu) if cpu and small else None,
        )
        start = 0
        for index, tensor in zip(ours, cpu, strict=True):
            if small:
                end = start + tensor.nbytes
                data = answers.table[:, start:end].reshape(-1)
                parts = tensor_of(data, tensor.dtype, (group.world_size, *tensor.shape))
                start = end
                reduced = _fold(parts, largest=largest)
            else:
                reduced = _all_reduce(tensor, wait, exchange.group, largest=largest)
            results[index] = reduced.to(tensors[index].device)
    for index in theirs:
        results[index] = _all_reduce(tensors[index], lambda work: work.wait(), None, largest=largest)
    return results


def _fold(parts: torch.Tensor, *, largest: bool) -> torch.Tensor:
    if largest or parts.dtype is torch.bool:
        return parts.any(0) if parts.dtype is torch.bool else parts.amax(0)
    return parts.sum(0, dtype=parts.dtype)


def _all_reduce(
    tensor: torch.Tensor, wait: Callable[[Any], None], group: dist.ProcessGroup | None, *, largest: bool
) -> torch.Tensor:
    kind = torch.uint8 if tensor.dtype is torch.bool else tensor.dtype
    if tensor.device.type == "cpu":
        kind = _SUMMED_AS.get(kind, kind)
    box = tensor.to(kind, copy=True, memory_format=torch.contiguous_format)
    op = dist.ReduceOp.MAX if largest or tensor.dtype is torch.bool else dist.ReduceOp.SUM
    wait(dist.all_reduce(box, op=op, group=group, async_op=True))
    return box.to(tensor.dtype)


def broadcast(value: Any, group: Group, *, from_process: int = 0) -> Any:
    """Overwrite tensors with those of one rank; they come back.

    Raises:
        NotATensor: something else than tensors.
        RuntimeMisuse: no such rank; types, shapes or containers differ, or some ranks do not come.
    """
    refuse_unknown_rank(from_process, group)
    tensors = leaves(value, "broadcast")
    exchange = group.exchange
    if exchange is None:
        return value
    ours, theirs = _by_device(tensors, group)
    if ours or is_checked(exchange, group):
        mine = joined([tensors[index].cpu() for index in ours]) if ours and group.rank == from_process else None
        form = f"{form_of(value)} from rank {from_process}"
        answers = exchange.call("broadcast", form=form, data=mine, source=from_process)
        data, start = answers.data(from_process), 0
        for index in ours if group.rank != from_process else ():
            end = start + tensors[index].nbytes
            _overwrite(tensors[index], tensor_of(data[start:end], tensors[index].dtype, tensors[index].shape))
            start = end
    for index in theirs:
        box = tensors[index].detach().contiguous()
        dist.broadcast(box, src=from_process)
        _overwrite(tensors[index], box)
    return value


def _overwrite(tensor: torch.Tensor, found: torch.Tensor) -> None:
    if tensor.data_ptr() != found.data_ptr():
        with torch.no_grad():
            tensor.copy_(found)


def is_checked(exchange: Exchange, group: Group) -> bool:
    """Whether the ranks compare a call that GPU tensors alone are in. All ranks answer alike: they count alike."""
    exchange.device_calls += 1
    return exchange.debug or exchange.device_calls <= CHECKED_CALLS


def _by_device(tensors: Sequence[torch.Tensor], group: Group) -> tuple[list[int], list[int]]:
    """Which tensors go over gloo, and which over the default group."""
    on_device = group.device.type != "cpu"
    theirs = [i for i, tensor in enumerate(tensors) if on_device and tensor.device.type == group.device.type]
    return [index for index in range(len(tensors)) if index not in theirs], theirs


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    return full(tensor).detach()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.ndim else tensor.reshape(1)
