"""Assignment of an epoch's batches to ranks.

The sampler determines the sequence of *raw* batches, which is the same on every rank. A *round* has as many raw batches
as there are ranks, and rank r takes the r-th of them. With ``split``, a round is one raw batch, and every rank takes an
equal part. If all batches have the same size, a rank computes its part without reading the other ranks' batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.sample_order import RawBatches, SampleOrder

__all__ = [
    "BatchesPart",
    "RankPart",
    "SamplesPart",
    "Sharing",
    "WalkedPart",
    "rounds",
    "with_last",
    "with_next",
]

T = TypeVar("T")
_Own = tuple[Any, int | None, int | None]


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The rule by which raw batches are assigned to ranks.

    Args:
        batch_size: samples in a full raw batch; None if unknown, or if raw batches are single samples.
        even: whether all ranks get the same number of batches: the epoch's first samples fill up an incomplete round.
            If false, the last ranks get fewer samples of an incomplete round, or none.
        split: whether every rank gets a part of each raw batch.
        drop_last: whether to drop incomplete rounds.

    Raises:
        RuntimeMisuse: ``split`` is set for several ranks, but ``batch_size`` is None or not a multiple of ``size``.
    """

    rank: int
    size: int
    batch_size: int | None
    even: bool = True
    split: bool = False
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.split and self.size > 1 and (self.batch_size is None or self.batch_size % self.size):
            what = "has no batch_size" if self.batch_size is None else f"has batch_size={self.batch_size}"
            raise RuntimeMisuse(
                f"split_batches=True divides every batch among the {self.size} ranks, but this loader {what}. "
                f"Choose a batch size that is a multiple of {self.size}, or remove split_batches=True"
            )

    @property
    def raw(self) -> int:
        """Number of raw batches in a round."""
        return 1 if self.split else self.size

    @property
    def width(self) -> int | None:
        """Number of samples in a full batch of one rank; None if unknown."""
        return self.batch_size and (self.batch_size // self.size if self.split else self.batch_size)

    @property
    def round(self) -> int | None:
        """Number of samples in a full round; None if unknown."""
        return self.batch_size and self.batch_size * self.raw

    def real(self, rest: int) -> int:
        """Number of this rank's samples among the ``rest`` samples of an incomplete round."""
        assert self.width is not None
        return min(max(rest - self.rank * self.width, 0), self.width)

    def count(self, units: int, round_size: int, width: int) -> int:
        """Number of this rank's batches in ``units`` units. A round has ``round_size`` units, a batch ``width``."""
        full, rest = divmod(units, round_size)
        if not rest or self.drop_last:
            return full
        return full + (self.even or self.size == 1 or rest > self.rank * width)


class RankPart(Protocol):
    """One rank's part of an epoch: the indices of each of its batches, in order."""

    @property
    def total(self) -> int | None:
        """Number of batches in the part; None while unknown."""

    def __iter__(self) -> Iterator[Any]: ...

    def samples(self, number: int) -> int | None:
        """Number of samples in the ``number``-th batch, counted from 1; None if unknown."""

    def valid(self, number: int) -> int | None:
        """How many leading samples of the ``number``-th batch are not repetitions; None if no sample is repeated."""


class SamplesPart:
    """One rank's batches, cut from an order of samples from sample ``start`` on. Only the last may be smaller."""

    def __init__(self, order: SampleOrder, sharing: Sharing, start: int, finish: Callable[[], None]) -> None:
        assert sharing.width is not None
        assert sharing.round is not None
        self._order, self._finish = order, finish
        self._start, self._width, self._round = start, sharing.width, sharing.round
        self._offset = sharing.rank * self._width
        self._full, rest = divmod(max(len(order) - start, 0), self._round)
        self.total = sharing.count(max(len(order) - start, 0), self._round, self._width)
        self._has_tail = self.total > self._full
        self._real = min(rest, self._width) if sharing.size == 1 else sharing.real(rest)
        self._fill = self._width - self._real if sharing.even and sharing.size > 1 else 0
        self._rest = rest

    def __iter__(self) -> Iterator[list[Any]]:
        first = self._start + self._offset
        yield from self._order.runs(first, step=self._round, width=self._width, count=self._full)
        if self._has_tail:
            tail = self._tail()
            if self._rest % self._width:
                self._finish()  # a short batch means that the sampler has been read to its end
            yield tail
        self._finish()

    def _tail(self) -> list[Any]:
        begin = self._start + self._full * self._round + self._offset
        own = self._order.slice(begin, begin + self._real) if self._real else []
        if not self._fill:
            return own
        first = self._order.slice(0, min(self._round, len(self._order)))
        skipped = self._offset + self._real - self._rest  # number of fill samples that lower ranks use
        return own + [first[(skipped + index) % len(first)] for index in range(self._fill)]

    def samples(self, number: int) -> int:
        return self._real + self._fill if self._has_tail and number == self.total else self._width

    def valid(self, number: int) -> int | None:
        return self._real if self._fill and self._has_tail and number == self.total else None


class BatchesPart:
    """One rank's whole raw batches, which may differ in size, from raw batch ``start`` on.

    With ``even``, the epoch's first batches fill up an incomplete round.
    """

    def __init__(self, batches: RawBatches, sharing: Sharing, start: int) -> None:
        left = max(len(batches) - start, 0)
        self.total = sharing.count(left, sharing.size, 1)
        self._batches, self._size = batches, sharing.size
        self._first = start + sharing.rank

    def _find(self, number: int) -> tuple[Any, bool]:
        place = self._first + (number - 1) * self._size
        if place < len(self._batches):
            return self._batches[place], False
        return self._batches[(place - len(self._batches)) % min(self._size, len(self._batches))], True

    def __iter__(self) -> Iterator[Any]:
        for number in range(1, self.total + 1):
            yield self._find(number)[0]

    def samples(self, number: int) -> int | None:
        return _length(self._find(number)[0])

    def valid(self, number: int) -> int | None:
        return 0 if self._find(number)[1] else None


class WalkedPart:
    """One rank's batches of a sequence that is read lazily, for example because its length is unknown."""

    def __init__(self, batches: Iterable[Any], sharing: Sharing, start: int) -> None:
        self.total: int | None = None
        self._batches, self._sharing, self._start = batches, sharing, start
        self._last: tuple[int | None, int | None] = None, None

    def take_first(self) -> Any:
        """The sequence's first raw batch, which stays in the sequence; None if the sequence is empty."""
        batches = iter(self._batches)
        first = next(batches, None)
        self._batches = batches if first is None else chain([first], batches)
        return first

    def __iter__(self) -> Iterator[Any]:
        number = 0
        for (own, samples, valid), is_last in _shared_out(self._batches, self._sharing, self._start):
            number += 1
            if is_last:
                self.total, self._last = number, (samples, valid)
            yield own
        if self.total is None:
            self.total = number

    def samples(self, number: int) -> int | None:
        return self._last[0] if number == self.total else self._sharing.width

    def valid(self, number: int) -> int | None:
        return self._last[1] if number == self.total else None


def _shared_out(batches: Iterable[Any], sharing: Sharing, start: int) -> Iterator[tuple[_Own, bool]]:
    """Yield this rank's batches, from raw batch ``start`` on, as pairs (batch, is_last)."""
    iterator = iter(batches)
    first = list(islice(iterator, sharing.raw))
    remaining = chain(first, iterator)
    for _ in islice(remaining, start):
        pass
    waiting: _Own | None = None
    for group, is_last in with_last(rounds(remaining, sharing.raw)):
        own = _own(group, first, sharing, is_last=is_last)
        if own is None:
            continue
        if waiting is not None:
            yield waiting, False
        waiting = own
    if waiting is not None:
        yield waiting, True


def _own(group: list[Any], first: list[Any], sharing: Sharing, *, is_last: bool) -> _Own | None:
    """This rank's batch of a round, its number of samples, and how many are not repetitions; None if it gets none."""
    size, rank = sharing.batch_size, sharing.rank
    if sharing.size == 1:
        return group[0], _length(group[0]), None
    if sharing.split and len(group[0]) > (size or 0):
        what = f"batch_size={size}, but returned a batch of {len(group[0])} samples"
        raise RuntimeMisuse(f"the batch sampler has {what}, which split_batches=True does not support")
    short = size is not None and all(len(batch) == size for batch in group[:-1]) and len(group[-1]) <= size
    if sharing.split or (is_last and short):
        return _own_samples(list(chain(*group)), list(chain(*first)), sharing)
    if rank < len(group) and (len(group) == sharing.raw or not sharing.drop_last):
        return group[rank], _length(group[rank]), None
    if not sharing.even or sharing.drop_last:
        return None
    repeated = first[(rank - len(group)) % len(first)]
    return repeated, _length(repeated), 0


def _own_samples(rest: list[Any], first: list[Any], sharing: Sharing) -> _Own | None:
    assert sharing.width is not None
    assert sharing.round is not None
    begin, real = sharing.rank * sharing.width, sharing.real(len(rest))
    own = rest[begin : begin + real]
    if len(rest) == sharing.round:
        return own, real, None
    if sharing.drop_last or (not sharing.even and not own):
        return None
    if not sharing.even:
        return own, real, None
    fill = [first[(begin + index - len(rest)) % len(first)] for index in range(real, sharing.width)]
    return own + fill, sharing.width, real if fill else None


def rounds(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of ``size`` consecutive items; the last list may be shorter."""
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group


def with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """The items, as pairs (item, is_last)."""
    return ((item, following is None) for item, following in with_next(items))


def with_next(items: Iterable[T]) -> Iterator[tuple[T, T | None]]:
    """Yield pairs (item, next item); the last item is paired with None.

    If reading the next item fails, first yield the item, paired with itself, and then raise the error.
    """
    iterator = iter(items)
    item = next(iterator, None)
    while item is not None:
        following, failed = None, None
        try:
            following = next(iterator, None)
        except Exception as error:
            failed = error
        if failed is None:
            yield item, following
        else:
            yield item, item
            raise failed
        item = following


def _length(batch: Any) -> int | None:
    try:
        return len(batch)
    except TypeError:
        return None  # a single index
