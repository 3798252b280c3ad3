"""What is read from front to back, and what one rank reads for all: rounds of batches, told apart from one another."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterDataPipe

from hpcaccel.runtime.data.cursor import Cursor
from hpcaccel.runtime.data.dispatch import Dispatcher
from hpcaccel.runtime.data.generators import drawn_apart
from hpcaccel.runtime.data.global_batches import Fill, SliceFn, Told, shared_out
from hpcaccel.runtime.data.inner_loader import WorkerStart, options_of
from hpcaccel.runtime.data.iterable import Bookmarks, Counting, Progress, StreamPart, forward
from hpcaccel.runtime.data.seeded_stream import SeededStream, is_stateful
from hpcaccel.runtime.data.sharding import Sharing, with_last
from hpcaccel.runtime.training.stop_agreement import WorkerInit, signals_held

__all__ = [
    "Announced",
    "TellingStream",
    "announced",
    "dispatched",
    "generator_of",
    "is_torchdatas",
    "make_stream",
    "picked",
]

Keep = Callable[[Any], None]

Announced = Iterator[tuple[Told | None, bool]]
"""This rank's batches (None where it gets none in a round), each with whether it is its last one."""


class OwnStream:
    """Each rank reads the dataset, and batches its own samples of it."""

    def __init__(self, user: DataLoader[Any], sharing: Sharing, generator: torch.Generator) -> None:
        self.dataset = self._part = StreamPart(user.dataset, sharing, workers=bool(user.num_workers))
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

    def pull(self, seed: int, given: int, behind: int, report: Progress, keep: Keep | None) -> Iterator[Told]:
        """Batches, after so many units that are thrown away.

        Args:
            seed: what is drawn while the stream is read follows from it.
            given: units that the dataset has given before.
            keep: given the first batch, if that is one of those thrown away whole.
        """
        whole = behind % self.units == 0 and (self._workers or keep is not None)
        in_samples = self.counts_samples and not whole
        self._part.used = behind if in_samples else 0
        self._part.report = None if self._workers else report
        self._part.seeded.begin(seed, given=given)
        with signals_held():
            source: Iterator[Any] = drawn_apart(self._inner, workers=self._workers)
        if not in_samples:
            source = forward(source, behind // self.units, report, None if keep is None else lambda item: keep(item[0]))
        for batch, samples, valid in source:
            yield Told(batch, samples, valid)


class ReadyStream:
    """A loader that is read as it is, every batch of it.

    Args:
        seeded: the dataset of a loader that seeds each batch; None where only the batches can be told apart.
    """

    def __init__(self, loader: DataLoader[Any], batch_size: int | None, seeded: SeededStream | None) -> None:
        self._loader = loader
        self.dataset = loader.dataset
        self.seeded = seeded
        self.units = batch_size or 1
        self.counts_samples = False
        if loader.num_workers and not isinstance(loader.worker_init_fn, WorkerStart):
            loader.worker_init_fn = WorkerStart(WorkerInit(loader.worker_init_fn))

    def pull(self, seed: int, given: int, behind: int, report: Progress, keep: Keep | None) -> Iterator[Told]:
        own = None if self.seeded is not None else seed
        if self.seeded is not None:
            self.seeded.begin(seed)  # what it has given before is in its state
        with signals_held():
            source: Iterator[Any] = drawn_apart(
                self._loader,
                workers=own is None and self._loader.num_workers > 0,
                seed=own,
                first=given // self.units,
            )
        source = forward(source, behind // self.units, report, keep)
        for batch in source:
            yield Told(batch, None)


def make_stream(
    user: DataLoader[Any], sharing: Sharing, generator: torch.Generator, *, stateful: bool, ready_made: bool
) -> TellingStream:
    """
    Args:
        generator: what the inner loader seeds its workers from.
        stateful: have torchdata's StatefulDataLoader read the dataset.
        ready_made: whole batches are wanted, to share them out, and not this rank's own samples.
    """
    if is_stateful(user) or stateful:
        loader, seeded = _seeded_loader(user, generator)
        ready = ReadyStream(loader, user.batch_size, seeded)
        return TellingStream(ready, loader, user, sharing, ready_made=ready_made)
    alone = Sharing(rank=0, size=1, batch_size=user.batch_size, drop_last=sharing.drop_last)
    source = OwnStream(user, alone if ready_made else sharing, generator)
    marked = user.dataset if is_stateful(user.dataset) and not user.num_workers else None
    return TellingStream(source, marked, user, sharing, ready_made=ready_made)


def _seeded_loader(user: DataLoader[Any], generator: torch.Generator) -> tuple[DataLoader[Any], SeededStream | None]:
    """A loader with a state, and the dataset in it that seeds what is drawn; a loader of the user's own class reads
    its dataset in ways that nobody knows, and stays as it is."""
    ours = not is_stateful(user)
    if not ours and (not is_torchdatas(user) or isinstance(user.dataset, IterDataPipe)):
        return user, None
    seeded = SeededStream(user.dataset, every=user.batch_size or 1, workers=bool(user.num_workers))
    if not ours:
        loader = copy.copy(user)
        loader.__dict__["dataset"] = seeded  # DataLoader does not let it be set
        return loader, seeded
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found, import-untyped, unused-ignore]

    batching = {"batch_size": user.batch_size, "drop_last": user.drop_last}
    loader = StatefulDataLoader(seeded, **batching, **options_of(user, generator))
    return loader, seeded


def is_torchdatas(loader: DataLoader[Any]) -> bool:
    """Whether it is torchdata's StatefulDataLoader, or one derived from it."""
    torchdata: Any = sys.modules.get("torchdata.stateful_dataloader")
    return torchdata is not None and isinstance(loader, torchdata.StatefulDataLoader)


class TellingStream:
    """A stream that knows the way back to where the checkpoint was made."""

    def __init__(
        self,
        source: OwnStream | ReadyStream,
        stateful: Any,
        user: DataLoader[Any],
        sharing: Sharing,
        *,
        ready_made: bool,
    ) -> None:
        self._source = source
        self.bookmarks = None if stateful is None else Bookmarks(stateful, generator_of(user.dataset))
        self._user = user
        self._sharing = sharing
        self.is_own = isinstance(source, OwnStream) or sharing.size == 1
        """Whether what comes out is this rank's own part, unless ready-made batches were wanted."""
        self._shares_batches = ready_made or not self.is_own
        self.fill = Fill()
        """What an unfinished round of shared batches is filled up with."""

    @property
    def dataset(self) -> Any:
        """What the inner loader reads."""
        return self._source.dataset

    @property
    def is_known(self) -> bool:
        """Whether it is known how the inner loader reads, so that what it draws can be seeded."""
        return isinstance(self._source, OwnStream) or self._source.seeded is not None

    @property
    def is_stateful_loader(self) -> bool:
        """Whether a loader with a state reads it."""
        return isinstance(self._source, ReadyStream)

    def share(self, sharing: Sharing) -> None:
        """Share out otherwise from the next iteration on."""
        if isinstance(self._source, OwnStream):
            self._source.share(sharing)

    def bookmark(self, used: int) -> dict[str, Any] | None:
        return None if self.bookmarks is None else self.bookmarks.newest(used)

    def open(
        self, cursor: Cursor, seed: int, *, shown: bool, meanwhile: Callable[[], None] | None = None
    ) -> Iterator[Told]:
        """The stream from the cursor's place on. Reading it leaves the process's generators as they are.

        Args:
            seed: of this epoch, the same on every rank.
            shown: whether this rank shows how far it is.
            meanwhile: called now and then while it reads forward.
        """
        saved = cursor.stream if cursor.resumed else None
        if saved is not None and "seeded" not in saved and isinstance(self._source, ReadyStream):
            saved = None  # of an earlier release, which has kept the dataset's state elsewhere
        given = 0 if self.bookmarks is None else self.bookmarks.begin(saved)
        behind = cursor.start - given
        if behind and cursor.resumed and self.bookmarks is None:
            self._explain(cursor, behind)
        if behind % self._source.units and not self._source.counts_samples:
            self._warn_of_repetition(cursor, behind % self._source.units)
        report = Progress("reading forward to where the training was", shown=shown, meanwhile=meanwhile)
        self.fill = Fill(from_round=self.bookmarks is not None)
        fills = self._shares_batches and self._sharing.even and self._sharing.size > 1
        keep = self._keep if fills and not self.fill.from_round else None
        pulled = self._source.pull(seed, given, behind, report, keep)
        return pulled if self.bookmarks is None else self._noted(pulled, self.bookmarks, cursor)

    def _keep(self, batch: Any) -> None:
        self.fill.first = batch

    def _noted(self, pulled: Iterator[Told], bookmarks: Bookmarks, cursor: Cursor) -> Iterator[Told]:
        given = cursor.start
        while (told := next(pulled, None)) is not None:
            given += self._source.units
            yield told
            bookmarks.note(given, cursor.used)
        bookmarks.drop(given)

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


def picked(told: Iterator[Told], sharing: Sharing, slice_fn: SliceFn | None, fill: Fill) -> Announced:
    """This rank's part of batches that every rank reads."""
    for parts, last in shared_out((item.batch for item in told), sharing, slice_fn=slice_fn, fill=fill):
        yield parts[sharing.rank], last[sharing.rank]


def dispatched(
    batches: Callable[[], tuple[Iterable[Any], Fill]],
    dispatcher: Dispatcher,
    sharing: Sharing,
    slice_fn: SliceFn | None,
) -> Announced:
    """This rank's part of batches that one rank reads."""
    dispatcher.begin()
    if not dispatcher.reads:
        while (received := dispatcher.receive()) is not None:
            yield received
        return
    shares: Any = None
    while True:
        try:
            if shares is None:
                read, fill = batches()
                shares = shared_out(read, sharing, slice_fn=slice_fn, fill=fill)
            share = next(shares, None)
        except Exception as error:
            dispatcher.fail(error)
            raise
        if share is None:
            break
        yield dispatcher.send(*share), share[1][sharing.rank]
    dispatcher.end()


def generator_of(dataset: Any) -> torch.Generator | None:
    """The dataset's own generator, which is saved and restored."""
    found = getattr(dataset, "generator", None)
    return found if isinstance(found, torch.Generator) else None
