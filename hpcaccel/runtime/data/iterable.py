"""For iterable datasets: selects each rank's samples, saves states of a stream, and reads forward to a position."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hpcaccel.runtime.data.inner_loader import SeededStream, is_stateful
from hpcaccel.runtime.data.sharding import Sharing, rounds

__all__ = ["Bookmarks", "Counting", "IterableDatasetShard", "SkipProgress", "StreamPart", "forward"]

BOOKMARK_SECONDS = 1.0
"""Minimum seconds between saved states of a stateful stream, because saving a state can take several times as long as
reading a small batch. A resume reads again what followed the last saved state."""
QUIET_SECONDS = 2.0
"""Seconds before progress is first printed, and minimum seconds between calls of ``meanwhile``."""
LINE_SECONDS = 30.0
"""Seconds between lines of progress if standard error is not a terminal."""


class StreamPart(IterableDataset[Any]):
    """This rank's samples of a dataset that every rank reads, in the order in which a DataLoader batches them.

    Args:
        sharing: the rule for the ranks' samples. Its ``batch_size`` is None if the loader does no automatic batching.
        workers: whether worker processes read the dataset.
    """

    def __init__(self, dataset: Any, sharing: Sharing, *, workers: bool) -> None:
        self.users_dataset = dataset
        self.seeded = SeededStream(dataset, every=sharing.round or sharing.size, workers=workers)
        self.sharing = sharing
        self.used = 0
        """Number of samples to skip at the start. Always 0 if there are several workers, or a worker that persists from
        an earlier iteration."""
        self.report: Callable[[int, int], None] | None = None

    def __iter__(self) -> Iterator[Any]:
        sharing = self.sharing
        size = sharing.round or sharing.size
        iterator: Iterator[Any] = iter(self.seeded)
        # An iteration over a stateful dataset may start in mid-epoch, without reading the epoch's first samples. The
        # samples of an incomplete round are then repeated to fill up the round.
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
    """Marks a sample as a repetition that fills up an incomplete round."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample


class IterableDatasetShard(IterableDataset[Any]):
    """One rank's samples of an iterable dataset that every rank reads.

    A round has ``batch_size`` samples of each rank, or with ``split_batches`` as many of all ranks together. The first
    samples of the dataset fill up an incomplete last round, so that all ranks get the same number of samples.

    Args:
        batch_size: number of consecutive samples of a rank; with ``split_batches``, of all ranks.
        drop_last: leave out an incomplete last round instead.

    Raises:
        RuntimeMisuse: ``split_batches`` is set, but ``batch_size`` is not a multiple of ``num_processes``.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size, self.drop_last, self.split_batches = batch_size, drop_last, split_batches
        self.num_processes, self.process_index = num_processes, process_index
        self.epoch = 0
        self._sharing  # noqa: B018  (raises if batches cannot be divided)

    @property
    def _sharing(self) -> Sharing:
        return Sharing(
            rank=self.process_index,
            size=self.num_processes,
            batch_size=self.batch_size,
            split=self.split_batches,
            drop_last=self.drop_last,
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset, if it has one; else the seed of its ``generator``, if it has one."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        width, size = self._sharing.width or 1, self._sharing.round or 1
        full, rest = divmod(len(self.dataset), size)
        return (full + bool(rest and not self.drop_last)) * width

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)  # the same order on all ranks
        width, size = self._sharing.width or 1, self._sharing.round or 1
        begin = self.process_index * width
        first: list[Any] = []
        for group in rounds(self.dataset, size):
            first = first or group
            if len(group) == size or not self.drop_last:
                yield from group[begin : begin + width]
                yield from (one.sample for one in _repeated(first, group, begin, width))


class Counting:
    """Calls the user's ``collate_fn``. Returns the batch, its number of samples (None if unknown), and how many of the
    samples are not repetitions (None if no sample is repeated).

    Args:
        batched: whether this is called with lists of samples; otherwise with single items of the dataset.
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
    """Saved states of a stream, each with the number of units that the stream had returned by then.

    Args:
        generator: the dataset's own generator, whose state is saved, too; None if there is none.
    """

    def __init__(self, stateful: Any, generator: torch.Generator | None) -> None:
        self.stateful = stateful
        self.seconds = BOOKMARK_SECONDS
        self._generator = generator
        self._kept: list[dict[str, Any]] = []
        self._at = 0.0

    def begin(self, saved: dict[str, Any] | None) -> int:
        """Start an iteration at the saved state, or at the beginning if ``saved`` is None. Returns the number of units
        before the start."""
        self._kept, self._at = [], time.monotonic()
        if saved is None:
            return 0
        self.stateful.load_state_dict(copy.deepcopy(saved["state"]))
        if self._generator is not None and saved.get("generator") is not None:
            self._generator.set_state(saved["generator"])
        self._kept.append(saved)
        return int(saved["at"])

    def note(self, given: int, used: int) -> None:
        """Save the stream's state if the interval has passed.

        Args:
            given: number of units that the stream has returned.
            used: number of units that all ranks together have used. Of the states up to there, only the newest is kept.
        """
        if time.monotonic() - self._at >= self.seconds:
            self._at = time.monotonic()
            behind = [mark for mark in self._kept if mark["at"] <= used]
            ahead = self._kept[len(behind) :]
            self._kept = [*behind[-1:], *ahead, self._mark(given)]

    def drop(self, given: int) -> None:
        """Drop the state that was saved after ``given`` units, at the end of the stream.

        That state may already be the start of the next epoch: if the last batch was short, the stream had been read to
        its end when the state was saved.
        """
        self._kept = [mark for mark in self._kept if mark["at"] != given]

    def _mark(self, given: int) -> dict[str, Any]:
        return {
            "at": given,
            "state": copy.deepcopy(self.stateful.state_dict()),
            "generator": None if self._generator is None else self._generator.get_state(),
            "seeded": True,
        }

    def newest(self, used: int) -> dict[str, Any] | None:
        """The newest state saved after at most ``used`` units; None if there is none."""
        fitting = [mark for mark in self._kept if mark["at"] <= used]
        return fitting[-1] if fitting else None


def forward(
    items: Iterable[Any],
    count: int,
    report: Callable[[int, int], None] | None = None,
    keep: Callable[[Any], None] | None = None,
) -> Iterator[Any]:
    """Read and discard the first ``count`` items; return an iterator over the rest.

    Args:
        report: called after each discarded item with the number of items read so far and ``count``.
        keep: called with the first discarded item.
    """
    iterator = iter(items)
    for number, item in enumerate(islice(iterator, max(count, 0)), 1):
        if number == 1 and keep is not None:
            keep(item)
        if report is not None:
            report(number, count)
    return iterator


class SkipProgress:
    """Prints the progress of reading forward to standard error, from 2 s on. On a terminal this is one line that is
    overwritten, elsewhere a line every 30 s.

    Args:
        what: the text before the numbers.
        shown: whether progress is printed at all.
        meanwhile: called between items, at most every 2 s, so that other ranks do not time out.
    """

    def __init__(self, what: str, *, shown: bool, meanwhile: Callable[[], None] | None = None) -> None:
        self._what = what
        self._shown = shown
        self._meanwhile = meanwhile
        self._begin = self._printed = self._called = time.monotonic()
        self._every = QUIET_SECONDS

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._meanwhile is not None and now - self._called >= QUIET_SECONDS:
            self._called = now
            self._meanwhile()
        if not self._shown or now - self._printed < self._every:
            return
        self._printed = now
        terminal = sys.stderr.isatty()
        self._every = 0.2 if terminal else LINE_SECONDS
        left = (now - self._begin) / done * (total - done)
        text = f"hpcaccel: {self._what}: {done:,} of {total:,} ({done / total:.0%}), about {left:,.0f} s left"
        print(f"\r{text}  " if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)
