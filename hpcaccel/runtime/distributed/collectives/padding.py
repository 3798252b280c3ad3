"""Padding of tensors to equal lengths across ranks, and the gather that removes repeated samples."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hpcaccel.runtime.distributed.collectives.gathering import gather, gather_all, gather_object, plain_of
from hpcaccel.runtime.distributed.collectives.nested_tensors import (
    form_of,
    honor_type,
    leaves,
    recursively_apply,
    refilled,
    same_mapping,
    tensor_kind,
)

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.process_group import RankGroup

__all__ = [
    "CannotPadNestedTensorWarning",
    "gather_for_metrics",
    "gather_samples",
    "pad_across_processes",
    "pad_input_tensors",
]

WHAT = "gather_for_metrics"


class CannotPadNestedTensorWarning(UserWarning):
    """A tensor of torch's nested layout has no single length and is returned unchanged."""


def pad_across_processes(
    value: Any, group: RankGroup, *, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Any:
    """Pad each tensor along ``dim`` with ``pad_index`` to its longest length on any rank: at the end, or at the
    beginning if ``pad_first`` is set.

    Tensors without that dimension are returned unchanged. The ranks exchange only lengths.

    Raises:
        NotATensor: a leaf is not a tensor.
        RuntimeMisuse: types, numbers of dimensions or containers differ among the ranks, or some ranks do not take
            part.
    """
    tensors = leaves(value, "pad_across_processes")
    padded = [index for index, tensor in enumerate(tensors) if _has(tensor, dim)]
    if group.exchange is None:
        return value
    messages = group.exchange.call(
        "pad_across_processes",
        form=f"{form_of(value, _kind_and_dimensions)} along dim {dim}",
        data=torch.tensor([tensors[index].shape[dim] for index in padded], dtype=torch.int64).view(torch.uint8),
    )
    lengths = messages.table.contiguous().view(torch.int64).amax(0).tolist() if padded else []
    for index, length in zip(padded, lengths, strict=True):
        tensors[index] = lengthened(tensors[index], length, dim=dim, filling=pad_index, first=pad_first)
    return refilled(value, tensors)


def lengthened(
    tensor: torch.Tensor, length: int, *, dim: int = 0, filling: float = 0, first: bool = False
) -> torch.Tensor:
    """``tensor`` padded with ``filling`` to ``length`` along ``dim``; the tensor itself if it is long enough."""
    missing = length - tensor.shape[dim]
    if missing <= 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    rest = tensor.new_full(shape, filling)
    return torch.cat([rest, tensor] if first else [tensor, rest], dim=dim)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Pad tensors of length ``batch_size`` along ``dim`` with zeros to the next positive multiple of ``num_processes``.

    Raises:
        NotATensor: a leaf is not a tensor.
    """
    rows = num_processes * max(1, -(-batch_size // num_processes))

    def lengthen(item: torch.Tensor) -> torch.Tensor:
        return lengthened(item, rows, dim=dim)

    return recursively_apply(lengthen, tensor, error_on_other_type=True)


def _has(tensor: torch.Tensor, dim: int) -> bool:
    if tensor.is_nested:
        warnings.warn(
            "pad_across_processes returns nested tensors unchanged: their components may differ in length",
            CannotPadNestedTensorWarning,
            stacklevel=4,
        )
        return False
    return -tensor.ndim <= dim < tensor.ndim


def _kind_and_dimensions(tensor: torch.Tensor) -> str:
    return f"{tensor_kind(tensor)}[{', '.join('…' * tensor.ndim)}]"


def gather_for_metrics(value: Any, group: RankGroup, source: object, *, use_gather_object: bool = False) -> Any:
    """All ranks' samples, without the repeated samples in the last batch of ``source``, the loader in use."""
    return gather_samples(
        value,
        group,
        samples=getattr(source, "batch_samples", None),
        valid=getattr(source, "valid_in_batch", None),
        use_gather_object=use_gather_object,
    )


def gather_samples(
    value: Any, group: RankGroup, *, samples: int | None, valid: int | None, use_gather_object: bool = False
) -> Any:
    """Concatenate all ranks' tensors along dimension 0, and join their lists of objects, in rank order, on every rank.
    Any other value becomes a list with one item per rank. A single process gets its own value back.

    Args:
        samples: number of samples in the batch: the length of a tensor or list with one entry per sample.
        valid: number of leading samples that are not repetitions; None if there are no repetitions.
        use_gather_object: gather everything as objects, so that tensors may differ in shape.

    Raises:
        RuntimeMisuse: types, shapes or containers differ among the ranks, or some ranks do not take part.
    """
    if use_gather_object:
        return gather_object(_cut(value, samples, valid), group)
    plan = _Plan(value)
    objects = [_cut(item, samples, valid) for item in plan.objects]
    if group.exchange is None:
        return plan.filled([_cut(gather(tensor, group), samples, valid) for tensor in plan.tensors], objects)
    tensors = _gather_tensors(plan.tensors, plan.form, group, samples, valid)
    if objects:
        objects = [_join(parts) for parts in zip(*group.exchange.objects_from_all(objects, what=WHAT), strict=True)]
    return plan.filled(tensors, objects)


def _gather_tensors(
    tensors: list[torch.Tensor], form: str, group: RankGroup, samples: int | None, valid: int | None
) -> list[torch.Tensor]:
    """Gather in two rounds: first the lengths along dimension 0 and the numbers of valid rows, then the tensors."""
    assert group.exchange is not None
    ready = [plain_of(tensor) for tensor in tensors]
    ready = [tensor if tensor.ndim else tensor.reshape(1) for tensor in ready]
    lengths = [-1 if samples is None else samples, -1 if valid is None else valid, *(len(tensor) for tensor in ready)]
    messages = group.exchange.call(WHAT, form=form, data=torch.tensor(lengths).view(torch.uint8))
    if not ready:
        return []
    reports = messages.table.contiguous().view(torch.int64).tolist()
    parts = []
    for index, tensor in enumerate(ready):
        own = [report[2 + index] for report in reports]
        by_sample = all(length == report[0] for length, report in zip(own, reports, strict=True))
        # Lengths may differ only if they are the ranks' batch sizes. If others differ, gather_all raises an error.
        longest = max(own) if by_sample else len(tensor)
        valid_here = [report[1] if by_sample else -1 for report in reports]
        kept = [length if count < 0 else count for length, count in zip(own, valid_here, strict=True)]
        parts.append((lengthened(tensor, longest), longest, kept))
    gathered = gather_all([part[0] for part in parts], group, [part[0] for part in parts], WHAT)
    return [_without_padding(whole, longest, kept) for whole, (_, longest, kept) in zip(gathered, parts, strict=True)]


def _without_padding(whole: torch.Tensor, longest: int, kept: list[int]) -> torch.Tensor:
    if all(count == longest for count in kept):
        return whole
    return torch.cat([whole[rank * longest : rank * longest + count] for rank, count in enumerate(kept)])


class _Plan:
    """The tensors and the objects of a nested value. A list or tuple without a tensor at any depth is one object."""

    def __init__(self, value: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self._shape = self._sort(value)
        self.form = form_of(recursively_apply(lambda hole: hole.example, self._shape, test_type=_is_hole), _kind)

    def _sort(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return _Hole(len(self.tensors) - 1, of_tensor=True, example=value)
        if isinstance(value, Mapping):
            return same_mapping(value, {key: self._sort(item) for key, item in value.items()})
        if isinstance(value, list | tuple) and _contains_tensor(value):
            return honor_type(value, [self._sort(item) for item in value])
        self.objects.append(value)
        return _Hole(len(self.objects) - 1, of_tensor=False, example=None)

    def filled(self, tensors: list[torch.Tensor], objects: list[Any]) -> Any:
        return recursively_apply(
            lambda hole: (tensors if hole.of_tensor else objects)[hole.index], self._shape, test_type=_is_hole
        )


class _Hole:
    """Placeholder for a tensor or an object in the containers of a ``_Plan``."""

    def __init__(self, index: int, *, of_tensor: bool, example: torch.Tensor | None) -> None:
        self.index = index
        self.of_tensor = of_tensor
        self.example = example


def _is_hole(value: Any) -> bool:
    return isinstance(value, _Hole)


def _kind(tensor: torch.Tensor) -> str:
    """Type and shape as text, without the length along dimension 0, which is exchanged separately."""
    return f"{tensor_kind(tensor)}[…, {', '.join(map(str, tensor.shape[1:]))}]"


def _contains_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_contains_tensor(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_contains_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


def _cut(value: Any, samples: int | None, valid: int | None) -> Any:
    """``value`` without repeated samples, if it has one entry per sample."""
    has_entries = isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.ndim > 0)
    return value[:valid] if valid is not None and has_entries and len(value) == samples else value


def _join(parts: tuple[Any, ...]) -> Any:
    first = parts[0]
    if all(isinstance(part, list | tuple) for part in parts):
        items = [item for part in parts for item in part]
        return tuple(items) if isinstance(first, tuple) else items
    return list(parts)
