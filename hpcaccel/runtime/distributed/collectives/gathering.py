"""Gather, reduce and broadcast of nested tensors and of Python objects.

CPU tensors use ``RankGroup.calls`` (gloo), GPU tensors the default group. The ranks compare their calls before they use
the data: always for CPU tensors; for GPU tensors only in debug mode or in the first ``CHECKED_CALLS`` calls, because
the comparison costs more than the collective itself. The first calls usually reveal a call under
``if is_main_process``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.collectives.exchange import INLINE_BYTES, Exchange
from hpcaccel.runtime.distributed.collectives.nested_tensors import form_of, leaves, recursively_apply, refilled
from hpcaccel.runtime.distributed.device_mesh import full, is_dtensor

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.process_group import RankGroup

__all__ = ["broadcast", "broadcast_object_list", "gather", "gather_object", "reduce"]

CHECKED_CALLS = 16
"""Number of calls with only GPU tensors that the ranks compare outside of debug mode."""
REDUCTIONS = ("sum", "mean", "max", "none")
_SUMMED_AS = {torch.bfloat16: torch.float32, torch.int16: torch.int32}
"""Types of CPU tensors that are reduced as another type: gloo rounds bfloat16 sums at each step, and lacks int16."""


def gather(value: Any, group: RankGroup) -> Any:
    """All ranks' tensors, concatenated along dimension 0 in rank order, on every rank; detached.

    Zero-dimensional tensors become one-dimensional. A DTensor is replaced by its full tensor, without concatenation. A
    single process gets its own tensors back, and values of other types unchanged.

    Raises:
        NotATensor: there are several ranks, and a leaf is not a tensor.
        RuntimeMisuse: types, shapes or containers differ among the ranks, or some ranks do not take part.
    """
    if group.exchange is None:
        return recursively_apply(lambda tensor: _rows(plain_of(tensor)), value)
    tensors = leaves(value, "gather")
    spread = [not is_dtensor(tensor) for tensor in tensors]
    ready = [_rows(plain_of(tensor)) for tensor in tensors]
    gathered = iter(gather_all([tensor for tensor, own in zip(ready, spread, strict=True) if own], group, value))
    return refilled(value, [next(gathered) if own else t for t, own in zip(ready, spread, strict=True)])


def gather_all(
    tensors: Sequence[torch.Tensor], group: RankGroup, value: Any, what: str = "gather"
) -> list[torch.Tensor]:
    """``gather`` of tensors with at least one dimension; ``value`` is the nested value that contains them."""
    exchange = group.exchange
    assert exchange is not None
    ours, theirs = _by_device(tensors, group)
    results: list[torch.Tensor | None] = [None] * len(tensors)
    if ours or is_checked(exchange, group):
        cpu = [tensors[index].cpu() for index in ours]
        messages = exchange.call(what, form=form_of(value), data=joined(cpu) if cpu else None)
        start = 0
        for index, tensor in zip(ours, cpu, strict=True):
            end = start + tensor.nbytes
            data = messages.table[:, start:end].reshape(-1)
            whole = tensor_of(data, tensor.dtype, _stacked(tensor, group.world_size))
            results[index], start = whole.to(tensors[index].device), end
    for index in theirs:
        results[index] = _gather_on_device(tensors[index], group.world_size)
    return [tensor for tensor in results if tensor is not None]


def _gather_on_device(tensor: torch.Tensor, world_size: int) -> torch.Tensor:
    data = bytes_of(tensor)
    box = data.new_empty(world_size * data.numel())
    if data.numel():
        # torch 2.13 renamed this function and warns if the old name is used.
        into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        into(box, data)
    return tensor_of(box, tensor.dtype, _stacked(tensor, world_size))


def _stacked(tensor: torch.Tensor, world_size: int) -> tuple[int, ...]:
    return (world_size * tensor.shape[0], *tensor.shape[1:])


def reduce(value: Any, group: RankGroup, *, reduction: str = "sum", scale: float = 1.0) -> Any:
    """The element-wise sum, mean or maximum over all ranks, multiplied by ``scale``, on every rank.

    The mean of integers is a float. The reduction ``none`` combines nothing: each rank gets its own tensors. Small CPU
    tensors are summed in rank order, so the result does not depend on the number of nodes.

    Raises:
        NotATensor: a leaf is not a tensor.
        RuntimeMisuse: ``reduction`` is unknown; types, shapes or containers differ among the ranks, or some ranks do
            not take part.
    """
    if reduction not in REDUCTIONS:
        raise RuntimeMisuse(f"unknown reduction {reduction!r} (allowed: {', '.join(REDUCTIONS)})")
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


def _reduce_all(tensors: Sequence[torch.Tensor], group: RankGroup, value: Any, *, largest: bool) -> list[torch.Tensor]:
    exchange = group.exchange
    assert exchange is not None
    ours, theirs = _by_device(tensors, group)
    results = [tensor.clone() for tensor in tensors]

    def wait(work: Any) -> None:
        exchange.wait(work, "reduce")

    if ours or is_checked(exchange, group):
        cpu = [tensors[index].cpu() for index in ours]
        small = sum(tensor.nbytes for tensor in cpu) <= INLINE_BYTES
        messages = exchange.call(
            "reduce",
            form=f"{form_of(value)}{' (max)' if largest else ''}",
            data=joined(cpu) if cpu and small else None,
        )
        start = 0
        for index, tensor in zip(ours, cpu, strict=True):
            if small:
                end = start + tensor.nbytes
                data = messages.table[:, start:end].reshape(-1)
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


def broadcast(value: Any, group: RankGroup, *, from_process: int = 0) -> Any:
    """Overwrite nested tensors with those of rank ``from_process``, and return them.

    Raises:
        NotATensor: a leaf is not a tensor.
        RuntimeMisuse: ``from_process`` is not a rank; types, shapes or containers differ among the ranks, or some ranks
            do not take part.
    """
    _require_rank(from_process, group)
    tensors = leaves(value, "broadcast")
    exchange = group.exchange
    if exchange is None:
        return value
    ours, theirs = _by_device(tensors, group)
    if ours or is_checked(exchange, group):
        mine = joined([tensors[index].cpu() for index in ours]) if ours and group.rank == from_process else None
        form = f"{form_of(value)} from rank {from_process}"
        messages = exchange.call("broadcast", form=form, data=mine, source=from_process)
        data, start = messages.data(from_process), 0
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
    if tensor.device != found.device or tensor.data_ptr() != found.data_ptr() or not found.data_ptr():
        with torch.no_grad():
            tensor.copy_(found)


def gather_object(value: Any, group: RankGroup) -> Any:
    """Concatenate all ranks' lists, tuples or sets in rank order into one list, on every rank. A tensor contributes its
    rows; any other value counts as one item. A single process gets its own value back."""
    if group.exchange is None:
        return value
    return [item for part in group.exchange.objects_from_all(value, what="gather_object") for item in _items(part)]


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple | set | frozenset):
        return value
    return value.unbind() if isinstance(value, torch.Tensor) and value.ndim else [value]


def broadcast_object_list(values: list[Any], group: RankGroup, *, from_process: int = 0) -> list[Any]:
    """Overwrite the items of a list with those of rank ``from_process``, and return the same list.

    Raises:
        RuntimeMisuse: ``from_process`` is not a rank; the lists differ in length, or some ranks do not take part.
    """
    _require_rank(from_process, group)
    if group.exchange is not None:
        form = f"{len(values)} objects from rank {from_process}"
        values[:] = group.exchange.object_from(from_process, values, what="broadcast_object_list", form=form)
    return values


def _require_rank(rank: int, group: RankGroup) -> None:
    """Check that ``rank`` exists.

    Raises:
        RuntimeMisuse: there is no such rank.
    """
    if not 0 <= rank < group.world_size:
        raise RuntimeMisuse(f"from_process={rank} is not a rank (0 to {group.world_size - 1})")


def is_checked(exchange: Exchange, group: RankGroup) -> bool:
    """Count a call that has only GPU tensors. Returns whether the ranks compare this call; the result is the same on
    all ranks."""
    exchange.device_calls += 1
    return exchange.debug or exchange.device_calls <= CHECKED_CALLS


def _by_device(tensors: Sequence[torch.Tensor], group: RankGroup) -> tuple[list[int], list[int]]:
    """Returns the indices of the tensors that use gloo, and the indices of those that use the default group."""
    on_device = group.device.type not in ("cpu", "xla")  # XLA would compile each of these calls
    theirs = [i for i, tensor in enumerate(tensors) if on_device and tensor.device.type == group.device.type]
    return [index for index in range(len(tensors)) if index not in theirs], theirs


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    return full(tensor).detach()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.ndim else tensor.reshape(1)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, (n,) uint8 on the same device; shares memory with the tensor if possible."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def tensor_of(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """``data``, (n,) uint8, as a tensor of ``dtype`` and ``shape``; shares memory with ``data`` if possible."""
    if data.storage_offset() % 16 or not data.is_contiguous():
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(dtype).reshape(tuple(shape))


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors' bytes, concatenated: (n,) uint8."""
    parts = [bytes_of(tensor) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
