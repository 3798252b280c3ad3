"""Datasets that can only be read from front to back: each rank's part of them, and ways back into the middle."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from hpcaccel.runtime.data.sharding import Sharing, rounds

__all__ = ["Bookmarks", "Counting", "Progress", "StreamPart", "forward", "is_stateful"]

BOOKMARK_SECONDS = 1.0
"""A stateful stream is asked for its state this often at most: that costs several times what a small batch does. What
was read since is read again after a resume."""
QUIET_SECONDS = 2.0
LINE_SECONDS = 30.0


def is_stateful(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


class StreamPart(IterableDataset[Any]):
    """This rank's samples of a dataset that every rank reads, in the order in which a DataLoader batches them.

    Args:
        sharing: its ``batch_size`` is None where the dataset gives what the loader gives.
    """

    def __init__(self, dataset: Any, sharing: Sharing) -> None:
        self.users_dataset = dataset
        self.sharing = sharing
        self.used = 0
        """Samples that all ranks have used; a place that only a loader without workers can be sent to."""
        self.report: Callable[[int, int], None] | None = None
        self.ready: Callable[[], None] | None = None
        """Called when all that has been used is behind."""

    def __iter__(self) -> Iterator[Any]:
        sharing = self.sharing
        size = sharing.round or sharing.size
        iterator = iter(self.users_dataset)
        first = list(islice(iterator, min(size, self.used))) if sharing.even else []
        iterator = forward(iterator, self.used - len(first), self.report)
        if self.ready is not None:
            self.ready()
        if sharing.size == 1:
            yield from iterator
            return
        width = sharing.width or 1
        begin = sharing.rank * width
        for group in rounds(iterator, size):
            if len(group) == size:
                yield from group[begin : begin + width]
            elif not sharing.drop_last:
                yield from group[begin : begin + width]
                if sharing.even:
                    yield from _repeated(first or group, group, begin, width)
            if sharing.even and len(first) < size:
                first = (first + group)[:size]


def _repeated(first: list[Any], rest: list[Any], begin: int, width: int) -> Iterator[Repeated]:
    for place in range(max(begin, len(rest)), begin + width):
        yield Repeated(first[(place - len(rest)) % len(first)])


class Repeated:
    """A sample that only fills up."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample


class Counting:
    """The user's ``collate_fn``, which also says how many samples a batch has, and how many are no repetitions.

    Args:
        batched: whether it is given lists of samples, and not what the dataset gives.
    """

    def __init__(self, collate: Callable[[Any], Any], *, batched: bool) -> None:
        self._collate = collate
        self._batched = batched

    def __call__(self, samples: Any) -> tuple[Any, int | None, int | None]:
        if not self._batched:
            repeated = type(samples) is Repeated
            return self._collate(samples.sample if repeated else samples), None, 0 if repeated else None
        count = len(samples)
        if type(samples[-1]) is not Repeated:
            return self._collate(samples), count, None
        valid = sum(type(sample) is not Repeated for sample in samples)
        plain = [sample.sample if type(sample) is Repeated else sample for sample in samples]
        return self._collate(plain), count, valid


class Bookmarks:
    """States of a stream, taken now and then, each with how many units it had given."""

    def __init__(self, stateful: Any) -> None:
        self.stateful = stateful
        self._kept: list[tuple[int, Any]] = []
        self._at = 0.0

    def begin(self, saved: dict[str, Any] | None) -> int:
        """An iteration begins, at the saved state or at the beginning; the units that the stream has given by then."""
        self._kept, self._at = [], time.monotonic()
        if saved is None:
            return 0
        self.stateful.load_state_dict(copy.deepcopy(saved["state"]))
        self._kept.append((saved["at"], saved["state"]))
        return int(saved["at"])

    def note(self, given: int, used: int) -> None:
        """The stream has given so many units, of which so many have been used; remember how it stands, unless that was
        done just now."""
        if time.monotonic() - self._at >= BOOKMARK_SECONDS:
            self._at = time.monotonic()
            behind = [mark for mark in self._kept if mark[0] <= used]
            ahead = self._kept[len(behind) :]
            self._kept = [*behind[-1:], *ahead, (given, copy.deepcopy(self.stateful.state_dict()))]

    def newest(self, used: int) -> dict[str, Any] | None:
        """The newest one that is not beyond what has been used."""
        fitting = [mark for mark in self._kept if mark[0] <= used]
        return {"at": fitting[-1][0], "state": fitting[-1][1]} if fitting else None


def forward(items: Iterable[Any], count: int, report: Callable[[int, int], None] | None = None) -> Iterator[Any]:
    """The items after the first ``count``, which are read and thrown away."""
    iterator = iter(items)
    for number, _ in enumerate(islice(iterator, max(count, 0)), 1):
        if report is not None:
            report(number, count)
    return iterator


class Progress:
    """Shows on standard error how far reading forward has come, once it has taken a while: a line that is written over
    on a terminal, a line now and then elsewhere."""

    def __init__(self, what: str, *, shown: bool, meanwhile: Callable[[], None] | None = None) -> None:
        self._what = what
        self._shown = shown
        self._meanwhile = meanwhile
        self._begin = self._said = time.monotonic()
        self._every = QUIET_SECONDS

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._said < self._every:
            return
        self._said = now
        if self._meanwhile is not None:
            self._meanwhile()
        if not self._shown:
            return
        terminal = sys.stderr.isatty()
        self._every = 0.2 if terminal else LINE_SECONDS
        left = (now - self._begin) / done * (total - done)
        text = f"hpcaccel: {self._what}: {done:,} of {total:,} ({done / total:.0%}), about {left:,.0f} s more"
        print(f"\r{text}  " if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)
