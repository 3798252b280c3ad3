"""Streams of batches from iterable datasets. A stream can continue at a checkpoint's position."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterDataPipe

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.cursor import Cursor
from hpcaccel.runtime.data.global_batches import FillBatch, RankBatch
from hpcaccel.runtime.data.inner_loader import (
    SeededStream,
    UserDatasetInit,
    has_shuffle_buffer,
    is_stateful,
    options_of,
)
from hpcaccel.runtime.data.iterable import Bookmarks, Counting, IterableDatasetShard, SkipProgress, StreamPart, forward
from hpcaccel.runtime.data.sharding import Sharing
from hpcaccel.runtime.rng.generators import drawn_apart
from hpcaccel.runtime.stop_flag import WorkerInit, signals_held

__all__ = [
    "ReportingStream",
    "generator_of",
    "is_torchdatas",
    "make_stream",
]

Keep = Callable[[Any], None]


class SplitStream:
    """A stream whose samples all ranks read. Each rank builds batches of its own part only."""

    def __init__(self, user: DataLoader[Any], sharing: Sharing, generator: torch.Generator) -> None:
        self.dataset = self._part = StreamPart(user.dataset, sharing, workers=bool(user.num_workers))
        self._workers = bool(user.num_workers)
        # A single worker reads the samples in order. It gets the position only if it starts with the iteration.
        self.counts_samples = not user.num_workers or (user.num_workers == 1 and not user.persistent_workers)
        """Whether the stream can continue at any sample. Otherwise it can continue only at the start of a round."""
        batched = user.batch_size is not None
        options = options_of(user, generator) | {"collate_fn": Counting(user.collate_fn, batched=batched)}
        if batched:
            options |= {"batch_size": sharing.width, "drop_last": user.drop_last}
        self._inner: DataLoader[Any] = DataLoader(self._part, **({"batch_size": None} | options))
        self.units = sharing.round or sharing.size
        """Number of units in a round."""

    def share(self, sharing: Sharing) -> None:
        before = self._part.sharing
        self._part.sharing = replace(sharing, rank=before.rank, size=before.size, split=before.split)

    def pull(self, seed: int, given: int, behind: int, report: SkipProgress, keep: Keep | None) -> Iterator[RankBatch]:
        """Batches from the stream's position on.

        Args:
            seed: seed of the draws from the global generators while the stream is read.
            given: number of units that the dataset had returned when its restored state was saved. It does not return
                them again.
            behind: number of units to read and discard first.
            report: called with the progress of reading forward.
            keep: called with the epoch's first batch, if the whole batch is discarded.
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
            yield RankBatch(batch, samples, valid)


class ReadyStream:
    """A stream of all batches of a loader that does its own batching.

    Args:
        seeded: the loader's dataset, if it seeds the global generators. If None, this process seeds them for each
            batch.
    """

    def __init__(self, loader: DataLoader[Any], batch_size: int | None, seeded: SeededStream | None) -> None:
        self._loader = loader
        self.dataset = loader.dataset
        self.seeded = seeded
        self.units = batch_size or 1
        self.counts_samples = False
        if loader.num_workers and not isinstance(loader.worker_init_fn, UserDatasetInit):
            loader.worker_init_fn = UserDatasetInit(WorkerInit(loader.worker_init_fn))

    def pull(self, seed: int, given: int, behind: int, report: SkipProgress, keep: Keep | None) -> Iterator[RankBatch]:
        own = None if self.seeded is not None else seed
        if self.seeded is not None:
            self.seeded.begin(seed)  # not ``given``: the loader's state contains the number of samples
        with signals_held():
            source: Iterator[Any] = drawn_apart(
                self._loader,
                workers=own is None and self._loader.num_workers > 0,
                seed=own,
                first=given // self.units,
            )
        source = forward(source, behind // self.units, report, keep)
        for batch in source:
            yield RankBatch(batch, None)


def make_stream(
    user: DataLoader[Any], sharing: Sharing, generator: torch.Generator, *, stateful: bool, ready_made: bool
) -> ReportingStream:
    """The stream of batches of the user's loader, which has an iterable dataset.

    Args:
        generator: generator from which the inner loader seeds its workers.
        stateful: whether to read the dataset with torchdata's StatefulDataLoader.
        ready_made: whether to return whole batches, to be divided among the ranks, instead of batches of this rank's
            own samples.

    Raises:
        RuntimeMisuse: the dataset already has only one rank's samples.
    """
    data = user.dataset
    if isinstance(data, IterableDatasetShard) and data.num_processes > 1 and sharing.size > 1:
        raise RuntimeMisuse(
            f"this DataLoader has an IterableDatasetShard of {data.num_processes} processes, and prepare() would shard "
            "the data a second time. Pass the whole dataset to the DataLoader, or do not prepare() it"
        )
    if is_stateful(user) or stateful:
        loader, seeded = _seeded_loader(user, generator)
        ready = ReadyStream(loader, user.batch_size, seeded)
        return ReportingStream(ready, loader, user, sharing, ready_made=ready_made)
    alone = Sharing(rank=0, size=1, batch_size=user.batch_size, drop_last=sharing.drop_last)
    source = SplitStream(user, alone if ready_made else sharing, generator)
    marked = user.dataset if is_stateful(user.dataset) and not user.num_workers else None
    return ReportingStream(source, marked, user, sharing, ready_made=ready_made)


def _seeded_loader(user: DataLoader[Any], generator: torch.Generator) -> tuple[DataLoader[Any], SeededStream | None]:
    """Returns a stateful loader, and its dataset, which seeds the global generators.

    If it is unknown how the user's loader reads its dataset, returns the user's loader and None. This is so if a
    stateful loader is not torchdata's, or if its dataset is an ``IterDataPipe``.
    """
    ours = not is_stateful(user)
    if not ours and (not is_torchdatas(user) or isinstance(user.dataset, IterDataPipe)):
        return user, None
    seeded = SeededStream(user.dataset, every=user.batch_size or 1, workers=bool(user.num_workers))
    if not ours:
        loader = copy.copy(user)
        loader.__dict__["dataset"] = seeded  # DataLoader.__setattr__ refuses to replace the dataset
        return loader, seeded
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found, import-untyped, unused-ignore]

    batching = {"batch_size": user.batch_size, "drop_last": user.drop_last}
    loader = StatefulDataLoader(seeded, **batching, **options_of(user, generator))
    return loader, seeded


def is_torchdatas(loader: DataLoader[Any]) -> bool:
    """Whether the loader is an instance of torchdata's StatefulDataLoader or of a subclass."""
    torchdata: Any = sys.modules.get("torchdata.stateful_dataloader")
    return torchdata is not None and isinstance(loader, torchdata.StatefulDataLoader)


class ReportingStream:
    """A stream that continues at a checkpoint's position: from a saved state, by reading forward, or both."""

    def __init__(
        self,
        source: SplitStream | ReadyStream,
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
        self.is_own = isinstance(source, SplitStream) or sharing.size == 1
        """Whether ``open`` returns only this rank's part. Has no meaning with ``ready_made``."""
        self._shares_batches = ready_made or not self.is_own
        self.fill = FillBatch()
        """Which samples fill up an incomplete round, if whole batches are divided among the ranks."""

    @property
    def dataset(self) -> Any:
        """The dataset that the inner loader reads."""
        return self._source.dataset

    @property
    def is_known(self) -> bool:
        """Whether it is known how the inner loader reads its dataset, so that its random draws can be seeded."""
        return isinstance(self._source, SplitStream) or self._source.seeded is not None

    @property
    def is_stateful_loader(self) -> bool:
        """Whether a stateful loader reads the dataset."""
        return isinstance(self._source, ReadyStream)

    def share(self, sharing: Sharing) -> None:
        """Use ``sharing`` from the next iteration on."""
        if isinstance(self._source, SplitStream):
            self._source.share(sharing)

    def bookmark(self, used: int) -> dict[str, Any] | None:
        return None if self.bookmarks is None else self.bookmarks.newest(used)

    def open(
        self, cursor: Cursor, seed: int, *, shown: bool, meanwhile: Callable[[], None] | None = None
    ) -> Iterator[RankBatch]:
        """The stream from the cursor's position on. Reading it does not change the global generators.

        Args:
            seed: seed of this epoch, the same on every rank.
            shown: whether this rank shows the progress of reading forward.
            meanwhile: called between items while the stream reads forward, at most every 2 s.
        """
        saved = cursor.stream if cursor.resumed else None
        if saved is not None and "seeded" not in saved and isinstance(self._source, ReadyStream):
            saved = None  # from an earlier release, which stored the dataset's state in another form
        given = 0 if self.bookmarks is None else self.bookmarks.begin(saved)
        behind = cursor.start - given
        if behind and cursor.resumed and self.bookmarks is None:
            self._explain(cursor, behind)
        if behind % self._source.units and not self._source.counts_samples:
            self._warn_of_repetition(cursor, behind % self._source.units)
        report = SkipProgress("skipping to the start position", shown=shown, meanwhile=meanwhile)
        self.fill = FillBatch(from_round=self.bookmarks is not None)
        fills = self._shares_batches and self._sharing.even and self._sharing.size > 1
        keep = self._keep if fills and not self.fill.from_round else None
        pulled = self._source.pull(seed, given, behind, report, keep)
        return pulled if self.bookmarks is None else self._noted(pulled, self.bookmarks, cursor)

    def _keep(self, batch: Any) -> None:
        self.fill.first = batch

    def _noted(self, pulled: Iterator[RankBatch], bookmarks: Bookmarks, cursor: Cursor) -> Iterator[RankBatch]:
        given = cursor.start
        while (batch := next(pulled, None)) is not None:
            given += self._source.units
            yield batch
            bookmarks.note(given, cursor.used)
        bookmarks.drop(given)

    def _explain(self, cursor: Cursor, behind: int) -> None:
        if is_stateful(self._user.dataset):
            why = f"the dataset's state is in worker processes (num_workers={self._user.num_workers})"
            what = "use num_workers=0, or torchdata's StatefulDataLoader, which saves the workers' state"
        elif has_shuffle_buffer(self._user.dataset):
            why = "the state of a stream with a shuffle buffer does not contain the samples in the buffer"
            what = "use shuffle(seed, buffer_size=1), which shuffles the stream's shards only"
        else:
            why = "an iterable dataset cannot start in the middle"
            what = "define state_dict() and load_state_dict() in the dataset"
        warnings.warn(
            f"resuming epoch {cursor.epoch}: {behind} {cursor.unit} are read and discarded, because {why}. To resume "
            f"without reading them, {what}",
            stacklevel=5,
        )

    def _warn_of_repetition(self, cursor: Cursor, count: int) -> None:
        warnings.warn(
            f"resuming epoch {cursor.epoch}: the last {count} {cursor.unit} before the checkpoint are repeated. This "
            f"stream can resume only at multiples of {self._source.units} {cursor.unit}, but the checkpoint was saved "
            "between two of them, with a different number of ranks or a different batch size. A plain DataLoader "
            "with num_workers=0, or with num_workers=1 and persistent_workers=False, can resume anywhere",
            stacklevel=5,
        )


def generator_of(dataset: Any) -> torch.Generator | None:
    """The dataset's attribute ``generator``, whose state is saved and restored; None if it is not a
    ``torch.Generator``."""
    found = getattr(dataset, "generator", None)
    return found if isinstance(found, torch.Generator) else None
