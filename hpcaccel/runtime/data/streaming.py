"""What is read from front to back, and what one rank reads for all: rounds of batches, told apart from one another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpcaccel.runtime.data.cursor import Cursor
from hpcaccel.runtime.data.dispatch import Dispatcher
from hpcaccel.runtime.data.iterable import Bookmarks, Counting, Progress, StreamPart, forward, is_stateful
from hpcaccel.runtime.data.reading import WorkerStart, options_of
from hpcaccel.runtime.data.rounds import SliceFn, Told, shared_out
from hpcaccel.runtime.data.sharding import Sharing, with_last
from hpcaccel.runtime.training.stop import WorkerInit, signals_held

__all__ = ["Announced", "TellingStream", "announced", "dispatched", "make_stream", "picked"]

Announced = Iterator[tuple[Told | None, bool]]
"""This rank's batches (None where it gets none in a round), each with whether it is its last one."""


class OwnStream:
    """Each rank reads the dataset, and batches its own samples of it."""

    def __init__(self, user: DataLoader[Any], sharing: Sharing, generator: torch.Generator) -> None:
        self._part = StreamPart(user.dataset, sharing)
        self._workers = bool(user.num_workers)
        # A single worker sees the samples in their order, and what it is told when it starts.
        self.counts_samples = not user.num_workers or (user.num_workers == 1 and not user.persistent_workers)
        """Whether any place in the stream can be found again; else only the beginning of a round."""
        batched = user.batch_size is not None
        options = options_of(user, generator) | {"collate_fn": Counting(user.collate_fn, batched=batched)}
        if batched:
            options |= {"batch_size": sharing.width, "drop_last": user.drop_last}
        self._inner: DataLoader[Any] = DataLoader(self._part, **({"batch_size": None} | options))
        self.units = sharing.round or sharing.size
        """Units that a pull takes."""

    def share(self, sharing: Sharing) -> None:
        before = self._part.sharing
        self._part.sharing = replace(sharing, rank=before.rank, size=before.size, split=before.split)

    def pull(self, behind: int, report: Progress, ready: Callable[[], None]) -> Iterator[Told]:
        """Batches, after so many units that are thrown away; ``ready`` is called when those are behind."""
        here = not self._workers
        in_samples = here or (self.counts_samples and behind % self.units != 0)
        self._part.used = behind if in_samples else 0
        self._part.report, self._part.ready = (report, ready) if here else (None, None)
        with signals_held():
            source: Iterator[Any] = iter(self._inner)
        if not in_samples:
            source = forward(source, behind // self.units, report)
        if not here:
            ready()
        for batch, samples, valid in source:
            yield Told(batch, samples, valid)


class ReadyStream:
    """A loader that is read as it is, every batch of it."""

    def __init__(self, loader: DataLoader[Any], batch_size: int | None) -> None:
        self._loader = loader
        self.units = batch_size or 1
        self.counts_samples = False
        if loader.num_workers and not isinstance(loader.worker_init_fn, WorkerStart):
            loader.worker_init_fn = WorkerStart(WorkerInit(loader.worker_init_fn))

    def pull(self, behind: int, report: Progress, ready: Callable[[], None]) -> Iterator[Told]:
        with signals_held():
            source: Iterator[Any] = iter(self._loader)
        source = forward(source, behind // self.units, report)
        ready()
        for batch in source:
            yield Told(batch, None)


def make_stream(
    user: DataLoader[Any], sharing: Sharing, generator: torch.Generator, *, stateful: bool, ready_made: bool
) -> TellingStream:
    """
    Args:
        stateful: have torchdata's StatefulDataLoader read the dataset.
        ready_made: whole batches are wanted, to share them out, and not this rank's own samples.
    """
    if stateful and not is_stateful(user):
        user = _stateful_loader(user, generator)
    if is_stateful(user):
        return TellingStream(ReadyStream(user, user.batch_size), user, user, sharing)
    alone = Sharing(rank=0, size=1, batch_size=user.batch_size, drop_last=sharing.drop_last)
    source = OwnStream(user, alone if ready_made else sharing, generator)
    marked = user.dataset if is_stateful(user.dataset) and not user.num_workers else None
    return TellingStream(source, marked, user, sharing)


def _stateful_loader(user: DataLoader[Any], generator: torch.Generator) -> DataLoader[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found, import-untyped, unused-ignore]

    batching = {"batch_size": user.batch_size, "drop_last": user.drop_last}
    loader: DataLoader[Any] = StatefulDataLoader(user.dataset, **batching, **options_of(user, generator))
    return loader


class TellingStream:
    """A stream that knows the way back to where the checkpoint was made."""

    def __init__(self, source: OwnStream | ReadyStream, stateful: Any, user: DataLoader[Any], sharing: Sharing) -> None:
        self._source = source
        self._bookmarks = None if stateful is None else Bookmarks(stateful)
        self._user = user
        self._sharing = sharing
        self.is_own = isinstance(source, OwnStream) or sharing.size == 1
        """Whether what comes out is this rank's own part."""

    def share(self, sharing: Sharing) -> None:
        """Share out otherwise from the next iteration on."""
        if isinstance(self._source, OwnStream):
            self._source.share(sharing)

    def bookmark(self, used: int) -> dict[str, Any] | None:
        return None if self._bookmarks is None else self._bookmarks.newest(used)

    def open(
        self, cursor: Cursor, restore: Callable[[], None], *, shown: bool, meanwhile: Callable[[], None] | None = None
    ) -> Iterator[Told]:
        """The stream from the cursor's place on.

        Args:
            restore: called when what had been used is behind.
            shown: whether this rank shows how far it is.
            meanwhile: called now and then while it reads forward.
        """
        saved = cursor.stream if cursor.resumed else None
        given = 0 if self._bookmarks is None else self._bookmarks.begin(saved)
        behind = cursor.start - given
        if behind and cursor.resumed and self._bookmarks is None:
            self._explain(cursor, behind)
        if behind % self._source.units and not self._source.counts_samples:
            self._warn_of_repetition(cursor, behind % self._source.units)
        report = Progress("reading forward to where the training was", shown=shown, meanwhile=meanwhile)
        pulled = self._source.pull(behind, report, restore)
        return pulled if self._bookmarks is None else self._noted(pulled, self._bookmarks, cursor)

    def _noted(self, pulled: Iterator[Told], bookmarks: Bookmarks, cursor: Cursor) -> Iterator[Told]:
        given = cursor.start
        while (told := next(pulled, None)) is not None:
            given += self._source.units
            yield told
            bookmarks.note(given, cursor.used)

    def _explain(self, cursor: Cursor, behind: int) -> None:
        if is_stateful(self._user.dataset):
            why = f"its state is in the {self._user.num_workers} workers"
            what = "Give prepare() torchdata's StatefulDataLoader, which hands it out, or use num_workers=0"
        else:
            why = "an iterable dataset cannot be asked for the sample in the middle"
            what = "Give the dataset state_dict() and load_state_dict() to go on at once"
        warnings.warn(
            f"resuming epoch {cursor.epoch}: {behind} {cursor.unit} are read and thrown away, because {why}. {what}",
            stacklevel=5,
        )

    def _warn_of_repetition(self, cursor: Cursor, count: int) -> None:
        warnings.warn(
            f"resuming epoch {cursor.epoch}: {count} {cursor.unit} that have been used come again, because this stream "
            f"is read in steps of {self._source.units}, and another number of ranks or batch size has stopped in the "
            "middle of one. Without workers, or with a single one that is not persistent, any place is found again",
            stacklevel=5,
        )


def announced(told: Iterator[Told]) -> Announced:
    """Batches that are this rank's own."""
    yield from with_last(told)


def picked(told: Iterator[Told], sharing: Sharing, slice_fn: SliceFn | None) -> Announced:
    """This rank's part of batches that every rank reads."""
    for parts, last in shared_out((item.batch for item in told), sharing, slice_fn=slice_fn):
        yield parts[sharing.rank], last[sharing.rank]


def dispatched(
    batches: Callable[[], Iterable[Any]], dispatcher: Dispatcher, sharing: Sharing, slice_fn: SliceFn | None
) -> Announced:
    """This rank's part of batches that one rank reads."""
    dispatcher.begin()
    if not dispatcher.reads:
        while (received := dispatcher.receive()) is not None:
            yield received
        return
    shares = shared_out(batches(), sharing, slice_fn=slice_fn)
    while True:
        try:
            share = next(shares, None)
        except Exception as error:
            dispatcher.fail(error)
            raise
        if share is None:
            break
        yield dispatcher.send(*share), share[1][sharing.rank]
    dispatcher.end()
