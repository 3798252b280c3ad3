"""Datasets that can only be read from front to back: each rank's part of them, and ways back into the middle."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hpcaccel.runtime.data.seeded_stream import SeededStream, is_stateful
from hpcaccel.runtime.data.sharding import Sharing, rounds

__all__ = ["Bookmarks", "Counting", "Progress", "StreamPart", "forward"]

BOOKMARK_SECONDS = 1.0
"""A stateful stream is asked for its state this often at most: that costs several times what a small batch does. What
was read since is read again after a resume."""
QUIET_SECONDS = 2.0
LINE_SECONDS = 30.0


class StreamPart(IterableDataset[Any]):
    """This rank's samples of a dataset that every rank reads, in the order in which a DataLoader batches them.

    Args:
        sharing: its ``batch_size`` is None where the dataset gives what the loader gives.
        workers: whether worker processes read it.
    """

    def __init__(self, dataset: Any, sharing: Sharing, *, workers: bool) -> None:
        self.users_dataset = dataset
        self.seeded = SeededStream(dataset, every=sharing.round or sharing.size, workers=workers)
        self.sharing = sharing
        self.used = 0
        """Samples that all ranks have used; a place that only a loader without workers can be sent to."""
        self.report: Callable[[int, int], None] | None = None

    def __iter__(self) -> Iterator[Any]:
        sharing = self.sharing
        size = sharing.round or sharing.size
        iterator: Iterator[Any] = iter(self.seeded)
        # A stateful dataset does not go back to its beginning: an unfinished round repeats samples of its own.
        fills_from_first = sharing.even and not is_stateful(self.users_dataset)
        first = list(islice(iterator, min(size, self.used))) if fills_from_first else []
        iterator = forward(iterator, self.used - len(first), self.report)
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
            if fills_from_first and len(first) < size:
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
    """States of a stream, taken now and then, each with how many units it had given.

    Args:
        generator: the dataset's own, from which it draws.
    """

    def __init__(self, stateful: Any, generator: torch.Generator | None) -> None:
        self.stateful = stateful
        self.seconds = BOOKMARK_SECONDS
        self._generator = generator
        self._kept: list[dict[str, Any]] = []
        self._at = 0.0

    def begin(self, saved: dict[str, Any] | None) -> int:
        """An iteration begins, at the saved state or at the beginning; the units that the stream has given by then."""
        self._kept, self._at = [], time.monotonic()
        if saved is None:
            return 0
        self.stateful.load_state_dict(copy.deepcopy(saved["state"]))
        if self._generator is not None and saved.get("generator") is not None:
            self._generator.set_state(saved["generator"])
        self._kept.append(saved)
        return int(saved["at"])

    def note(self, given: int, used: int) -> None:
        """The stream has given so many units, of which so many have been used; remember how it stands, unless that was
        done just now."""
        if time.monotonic() - self._at >= self.seconds:
            self._at = time.monotonic()
            behind = [mark for mark in self._kept if mark["at"] <= used]
            ahead = self._kept[len(behind) :]
            self._kept = [*behind[-1:], *ahead, self._mark(given)]

    def drop(self, given: int) -> None:
        """The stream has ended after so many units: to come upon a short batch it has been read to its end, where its
        state may be that of the next epoch's beginning."""
        self._kept = [mark for mark in self._kept if mark["at"] != given]

    def _mark(self, given: int) -> dict[str, Any]:
        return {
            "at": given,
            "state": copy.deepcopy(self.stateful.state_dict()),
            "generator": None if self._generator is None else self._generator.get_state(),
            "seeded": True,
        }

    def newest(self, used: int) -> dict[str, Any] | None:
        """The newest one that is not beyond what has been used."""
        fitting = [mark for mark in self._kept if mark["at"] <= used]
        return fitting[-1] if fitting else None


def forward(
    items: Iterable[Any],
    count: int,
    report: Callable[[int, int], None] | None = None,
    keep: Callable[[Any], None] | None = None,
) -> Iterator[Any]:
    """The items after the first ``count``, which are read and thrown away; the very first is given to ``keep``."""
    iterator = iter(items)
    for number, item in enumerate(islice(iterator, max(count, 0)), 1):
        if number == 1 and keep is not None:
            keep(item)
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
