"""``gather_for_metrics``: every sample once, though the last batches were filled up so that all ranks get equally many.

What is dropped is told sample by sample: the loader in use knows how many leading samples of its last batch are real,
and only a tensor, or a list, with as many entries as that batch has samples is one entry a sample. A statistic of
another length stays whole. All ranks do the same whether they have padding or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hpcaccel.runtime.distributed.collectives.gathering import gather, gather_all, plain_of
from hpcaccel.runtime.distributed.collectives.nested_tensors import honor_type, recursively_apply, same_mapping
from hpcaccel.runtime.distributed.collectives.objects import from_all, gather_object
from hpcaccel.runtime.distributed.collectives.padding import lengthened
from hpcaccel.runtime.distributed.collectives.structure_text import form_of, tensor_kind

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.process_group import Group
    from hpcaccel.runtime.training.accumulation import Source

__all__ = ["gather_for_metrics", "gather_samples"]

WHAT = "gather_for_metrics"


def gather_for_metrics(value: Any, group: Group, source: Source | None, *, use_gather_object: bool = False) -> Any:
    """All ranks' samples, without those that ``source``, the loader in use, has repeated in its last batch."""
    return gather_samples(
        value,
        group,
        samples=getattr(source, "batch_samples", None),
        valid=getattr(source, "valid_in_batch", None),
        use_gather_object=use_gather_object,
    )


def gather_samples(
    value: Any, group: Group, *, samples: int | None, valid: int | None, use_gather_object: bool = False
) -> Any:
    """Tensors concatenated along dimension 0, lists of objects joined, in rank order, on every rank. Anything else
    becomes a list with one item a rank; a lone rank gets its own back.

    Args:
        samples: how many entries a tensor or a list has that has one a sample.
        valid: how many of them, from the front, count; None: all.
        use_gather_object: treat everything as objects, so that tensors need not have the same shapes.

    Raises:
        RuntimeMisuse: types, shapes or containers differ among the ranks, or some ranks do not come.
    """
    if use_gather_object:
        return gather_object(_cut(value, samples, valid), group)
    plan = _Plan(value)
    objects = [_cut(item, samples, valid) for item in plan.objects]
    if group.exchange is None:
        return plan.filled([_cut(gather(tensor, group), samples, valid) for tensor in plan.tensors], objects)
    tensors = _gather_tensors(plan.tensors, plan.form, group, samples, valid)
    if objects:
        objects = [_join(parts) for parts in zip(*from_all(group.exchange, objects, what=WHAT), strict=True)]
    return plan.filled(tensors, objects)


def _gather_tensors(
    tensors: list[torch.Tensor], form: str, group: Group, samples: int | None, valid: int | None
) -> list[torch.Tensor]:
    """Two rounds: the lengths along dimension 0, and what is to be kept of them; then the tensors."""
    assert group.exchange is not None
    ready = [plain_of(tensor) for tensor in tensors]
    ready = [tensor if tensor.ndim else tensor.reshape(1) for tensor in ready]
    lengths = [-1 if samples is None else samples, -1 if valid is None else valid, *(len(tensor) for tensor in ready)]
    answers = group.exchange.call(WHAT, form=form, data=torch.tensor(lengths).view(torch.uint8))
    if not ready:
        return []
    said = answers.table.contiguous().view(torch.int64).tolist()
    parts = []
    for index, tensor in enumerate(ready):
        own = [rank_said[2 + index] for rank_said in said]
        by_sample = all(length == rank_said[0] for length, rank_said in zip(own, said, strict=True))
        # Of unequal lengths only those that the loaders explain are joined; the others are refused by gather.
        longest = max(own) if by_sample else len(tensor)
        valid_here = [rank_said[1] if by_sample else -1 for rank_said in said]
        kept = [length if count < 0 else count for length, count in zip(own, valid_here, strict=True)]
        parts.append((lengthened(tensor, longest), longest, kept))
    gathered = gather_all([part[0] for part in parts], group, [part[0] for part in parts], WHAT)
    return [_without_padding(whole, longest, kept) for whole, (_, longest, kept) in zip(gathered, parts, strict=True)]


def _without_padding(whole: torch.Tensor, longest: int, kept: list[int]) -> torch.Tensor:
    if all(count == longest for count in kept):
        return whole
    return torch.cat([whole[rank * longest : rank * longest + count] for rank, count in enumerate(kept)])


class _Plan:
    """Which parts of a nested value are tensors, and which are objects: a list or a tuple in which there is no tensor
    at any depth is one of objects."""

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
        if isinstance(value, list | tuple) and _holds_tensor(value):
            return honor_type(value, [self._sort(item) for item in value])
        self.objects.append(value)
        return _Hole(len(self.objects) - 1, of_tensor=False, example=None)

    def filled(self, tensors: list[torch.Tensor], objects: list[Any]) -> Any:
        return recursively_apply(
            lambda hole: (tensors if hole.of_tensor else objects)[hole.index], self._shape, test_type=_is_hole
        )


class _Hole:
    def __init__(self, index: int, *, of_tensor: bool, example: torch.Tensor | None) -> None:
        self.index = index
        self.of_tensor = of_tensor
        self.example = example


def _is_hole(value: Any) -> bool:
    return isinstance(value, _Hole)


def _kind(tensor: torch.Tensor) -> str:
    """Without the length along dimension 0, which the ranks compare by themselves."""
    return f"{tensor_kind(tensor)}[…, {', '.join(map(str, tensor.shape[1:]))}]"


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensor(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


def _cut(value: Any, samples: int | None, valid: int | None) -> Any:
    """Without the padding, if it has one entry a sample."""
    has_entries = isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.ndim > 0)
    return value[:valid] if valid is not None and has_entries and len(value) == samples else value


def _join(parts: tuple[Any, ...]) -> Any:
    first = parts[0]
    if all(isinstance(part, list | tuple) for part in parts):
        items = [item for part in parts for item in part]
        return tuple(items) if isinstance(first, tuple) else items
    return list(parts)
