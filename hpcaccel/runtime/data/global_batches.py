"""Division of collated batches among ranks: in each round (see ``sharding``), a rank gets a whole batch or some of the
samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.sharding import Sharing, rounds, with_last, with_next

__all__ = ["Announced", "FillBatch", "RankBatch", "SliceFn", "first_dimension", "picked", "shared_out"]

SliceFn = Callable[..., Any]
"""``slice_fn(batch, slice, process_index=r, num_processes=P)`` returns rank r's part of a batch."""


@dataclass(frozen=True)
class RankBatch:
    """One rank's batch, and the number of its samples."""

    batch: Any
    samples: int | None
    """Number of samples in the batch; None if unknown."""
    valid: int | None = None
    """How many leading samples of the batch are not repetitions; None if no sample is repeated."""


@dataclass
class FillBatch:
    """Which samples fill up an incomplete round: samples of the epoch's first batch, or of the round itself."""

    first: Any = None
    """The epoch's first batch. If None, it is set to the first batch that this iteration reads."""
    from_round: bool = False
    """Whether to use samples of the round itself, because the epoch's first batch cannot be read again."""


Announced = Iterator[tuple[RankBatch | None, bool]]
"""For each round: this rank's batch (None if the rank gets no batch), and whether it is the rank's last batch."""


def shared_out(
    batches: Iterable[Any], sharing: Sharing, *, slice_fn: SliceFn | None = None, fill: FillBatch | None = None
) -> Iterator[tuple[list[RankBatch | None], list[bool]]]:
    """For each round, yield two lists: every rank's batch (None for a rank that gets no batch), and for every rank
    whether this is its last batch."""
    for parts, following in with_next(_shares(batches, sharing, slice_fn, fill or FillBatch())):
        # Only in the last round can a rank get no batch.
        yield parts, [following is None or following[rank] is None for rank in range(sharing.size)]


def picked(batches: Iterator[RankBatch], sharing: Sharing, slice_fn: SliceFn | None, fill: FillBatch) -> Announced:
    """This rank's parts of ``batches``, which every rank reads."""
    for parts, last in shared_out((item.batch for item in batches), sharing, slice_fn=slice_fn, fill=fill):
        yield parts[sharing.rank], last[sharing.rank]


def _shares(
    batches: Iterable[Any], sharing: Sharing, slice_fn: SliceFn | None, fill: FillBatch
) -> Iterator[list[RankBatch | None]]:
    for group, is_last in with_last(_complete(batches, sharing)):
        first = group[0] if fill.from_round else fill.first
        if first is None:
            first = fill.first = group[0]
        yield _share(group, first, sharing, slice_fn, is_last=is_last)


def _complete(batches: Iterable[Any], sharing: Sharing) -> Iterator[list[Any]]:
    for group in rounds(batches, sharing.raw):
        if len(group) == sharing.raw or not sharing.drop_last:
            yield group


def _share(
    group: list[Any], first: Any, sharing: Sharing, slice_fn: SliceFn | None, *, is_last: bool
) -> list[RankBatch | None]:
    if not sharing.split and slice_fn is None:
        sizes = [_size(batch) for batch in group]
        if len(group) == sharing.size and not (is_last and _is_short(sizes, first, sharing)):
            return [RankBatch(batch, size) for batch, size in zip(group, sizes, strict=True)]
        if None in sizes or not _can_join(group):
            return _whole(group, first, sharing)
    return _cut(group, first, sharing, slice_fn)


def _is_short(sizes: list[int | None], first: Any, sharing: Sharing) -> bool:
    full = sharing.batch_size or _size(first)
    return sharing.even and sizes[-1] is not None and full is not None and sizes[-1] < full


def _whole(group: list[Any], first: Any, sharing: Sharing) -> list[RankBatch | None]:
    """Assign batches that cannot be joined: the first ranks get one each. The other ranks get repeated batches with
    ``even``, else None."""
    given: list[RankBatch | None] = [RankBatch(batch, _size(batch)) for batch in group]
    missing = sharing.size - len(group)
    if not sharing.even:
        return [*given, *[None] * missing]
    return [
        *given,
        *(RankBatch(group[index % len(group)], _size(group[index % len(group)]), 0) for index in range(missing)),
    ]


def _cut(group: list[Any], first: Any, sharing: Sharing, slice_fn: SliceFn | None) -> list[RankBatch | None]:
    """Divide the round's samples into parts of equal size. Without ``even``, the last parts may be smaller or None.

    With ``even``, samples of ``first`` fill up the last parts; if ``first`` cannot be joined with the round's batches,
    samples of the round itself do.
    """
    whole = group[0] if len(group) == 1 else _join(group)
    count = first_dimension(whole)
    width = -(-count // sharing.size)
    if sharing.even and count % sharing.size:
        whole = _filled(whole, first if _can_join([group[0], first]) else whole, width * sharing.size)
    parts: list[RankBatch | None] = []
    for rank in range(sharing.size):
        begin = rank * width
        end = begin + width if sharing.even else min(begin + width, count)
        if end <= begin:
            parts.append(None)
            continue
        if slice_fn is None:
            part = _slice(whole, slice(begin, end), first_dimension(whole))
        else:
            part = slice_fn(whole, slice(begin, end), process_index=rank, num_processes=sharing.size)
        real = min(max(count - begin, 0), end - begin)
        parts.append(RankBatch(part, end - begin, None if real == end - begin else real))
    return parts


def _filled(whole: Any, first: Any, wanted: int) -> Any:
    """Extend ``whole`` to ``wanted`` samples with the samples of ``first``, which are repeated if necessary."""
    parts, count = [whole], first_dimension(whole)
    size = first_dimension(first)
    while count < wanted:
        take = min(size, wanted - count)
        parts.append(_slice(first, slice(0, take), size))
        count += take
    return _join(parts)


def first_dimension(batch: Any) -> int:
    """Number of samples in a batch: the size of the first dimension of all its tensors except scalars.

    Raises:
        RuntimeMisuse: no tensor has a first dimension, or the tensors' first dimensions differ.
    """
    sizes = {leaf.shape[0] for leaf in _tensors(batch) if leaf.ndim}
    if len(sizes) != 1:
        what = f"first dimensions {sorted(sizes)}" if sizes else "no tensor with a first dimension"
        raise RuntimeMisuse(
            f"a batch with {what} cannot be split among the ranks: the first dimension of every tensor must be the "
            "number of samples. Change the DataLoader's collate_fn, or pass dispatch_batches=False so that every rank "
            "reads its own batches"
        )
    return int(sizes.pop())


def _size(batch: Any) -> int | None:
    sizes = {leaf.shape[0] for leaf in _tensors(batch) if leaf.ndim}
    return int(sizes.pop()) if len(sizes) == 1 else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _can_join(batches: list[Any]) -> bool:
    """Whether the tensors of these batches can be concatenated along dimension 0. Tensors that are padded to different
    lengths cannot."""
    shapes = {tuple(leaf.shape[1:] for leaf in _tensors(batch)) for batch in batches}
    return len(shapes) == 1


def _join(parts: list[Any]) -> Any:
    """Concatenate batches: tensors along dimension 0, and lists without tensors. Other values are taken from the first
    batch."""
    head = parts[0]
    if isinstance(head, torch.Tensor):
        return torch.cat(parts) if head.ndim else head
    if isinstance(head, Mapping):
        joined = {key: _join([part[key] for part in parts]) for key in head}
        return joined if type(head) is dict else type(head)(joined)  # type: ignore[call-arg]
    if isinstance(head, list | tuple) and any(True for _ in _tensors(head)):
        columns = [_join(list(column)) for column in zip(*parts, strict=True)]
        return type(head)(*columns) if hasattr(head, "_fields") else type(head)(columns)
    if isinstance(head, list | tuple):
        return type(head)(item for part in parts for item in part)
    return head


def _slice(value: Any, part: slice, count: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[part] if value.ndim else value
    if isinstance(value, Mapping):
        sliced = {key: _slice(item, part, count) for key, item in value.items()}
        return sliced if type(value) is dict else type(value)(sliced)  # type: ignore[call-arg]
    if isinstance(value, list | tuple) and any(True for _ in _tensors(value)):
        items = [_slice(item, part, count) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list | tuple) and len(value) == count:
        return value[part]
    return value
