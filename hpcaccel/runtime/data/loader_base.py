"""Base classes of a prepared loader: facts about its batches, reasons for inexact resumes, opening its iterators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from hpcaccel.runtime.data.cursor import Cursor
from hpcaccel.runtime.data.dispatch import Dispatcher, dispatched
from hpcaccel.runtime.data.global_batches import Announced, FillBatch, RankBatch, SliceFn, picked
from hpcaccel.runtime.data.inner_loader import LoaderPlan, is_stateful
from hpcaccel.runtime.data.sharding import RankPart, Sharing, WalkedPart, with_last
from hpcaccel.runtime.data.streaming import ReportingStream
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.rng.determinism import mix
from hpcaccel.runtime.rng.generators import drawn_apart
from hpcaccel.runtime.rng.script_generators import generators_in
from hpcaccel.runtime.stop_flag import signals_held

__all__ = ["LoaderFacts", "ReadingLoader"]


class LoaderFacts(DataLoader[Any]):
    """A loader's sizes, and facts about its latest batch. Other attributes are those of the user's loader."""

    user_loader: DataLoader[Any]
    at_last_batch: bool
    _cursor: Cursor
    _sharing: Sharing
    _part: RankPart | None
    _latest: RankBatch
    _skip: int | None

    def __getattr__(self, name: str) -> Any:
        if name == "user_loader":
            raise AttributeError(name)
        return getattr(self.user_loader, name)

    def skipping(self, batches: int) -> LoaderFacts:
        """A view of this loader that skips another ``batches`` of this rank's batches at the start of each epoch.

        Skipped samples of map-style data are read only to fill up the last round.
        """
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._skip = (self._skip or 0) + batches
        return view

    @property
    def trains(self) -> bool:
        """Whether optimizer steps follow this loader's batches.

        Such a loader ends its iteration early when the training finishes.
        """
        return self._cursor.trains

    @trains.setter
    def trains(self, value: bool) -> None:
        self._cursor.trains = value

    @property
    def given_at_step(self) -> int:
        """How many optimizer steps had been done when this loader returned its latest batch."""
        return self._cursor.step

    @property
    def identity(self) -> int:
        """A number that is the same for all views of one loader."""
        return id(self._cursor)

    @property
    def place(self) -> tuple[int, int]:
        """The number of the current iteration, and how many batches were returned in it."""
        return self._cursor.place

    @property
    def end_of_dataloader(self) -> bool:
        return self.at_last_batch

    @property
    def valid_in_batch(self) -> int | None:
        """How many leading samples of the latest batch are not repetitions; None if no sample is repeated."""
        return self._latest.valid if self._part is None else self._part.valid(self._cursor.rounds)

    @property
    def batch_samples(self) -> int | None:
        """Number of samples in this rank's latest batch; None if unknown."""
        return self._latest.samples if self._part is None else self._part.samples(self._cursor.rounds)

    @property
    def total_batch_size(self) -> int:
        """Number of samples in a full batch, all ranks together.

        Raises:
            TypeError: the loader has no fixed batch size.
        """
        if self._sharing.round is None:
            raise TypeError("this loader has no fixed batch size, so it has no total_batch_size")
        return self._sharing.round

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset, on all ranks together."""
        found: Any = getattr(self.dataset, "total_length", None)
        return int(len(self.dataset) if found is None else found)  # type: ignore[arg-type]

    @property
    def remainder(self) -> int:
        """Number of samples in the epoch's last, incomplete round; -1 if it is unknown or the round is dropped."""
        order = self._cursor.order
        units = None if order is None or not order.is_flat or self._sharing.drop_last else order.length
        return -1 if units is None else units % self.total_batch_size

    @property
    def iteration(self) -> int:
        """Number of the current epoch; between iterations, the number of the next epoch."""
        return self._cursor.epoch if self._cursor.running else self._cursor.next_epoch


class LoaderExactness(LoaderFacts):
    """Facts about a loader that determine whether a resume is exact; see ``Exactness``."""

    changes: tuple[str, ...] = ()
    """Differences between this loader's settings and the settings in the loaded checkpoint."""
    dispatch_batches: bool
    _plan: LoaderPlan
    _stream: ReportingStream

    def reads_with(self, iterator: Any) -> bool:
        """Whether ``iterator``, an iterator of a DataLoader, belongs to this loader's inner DataLoader."""
        if self._cursor.order is None:
            return bool(iterator._dataset is self._stream.dataset)
        return iterator._index_sampler is self._plan

    @property
    def reading(self) -> dict[str, Any]:
        """The settings that, with seed and position, determine the batches."""
        user, order = self.user_loader, self._cursor.order
        # A map-style batch is seeded by its position, whichever worker reads it.
        workers = {"num_workers": user.num_workers} if order is None else {"workers": user.num_workers > 0}
        return {
            **workers,
            "batch_size": user.batch_size,
            "samples": None if order is None else order.length,
            "dispatch_batches": self.dispatch_batches,
        }

    def changes_since(self, then: dict[str, Any]) -> tuple[str, ...]:
        """Differences between this loader's ``reading`` and ``then``, which is the saved loader's ``reading``."""
        now = self.reading
        return tuple(
            f"DataLoader {name}: {then[name]} at the save, {now[name]} now"
            for name in now
            if name in then and then[name] != now[name]
        )

    @property
    def own_parts(self) -> dict[str, Any]:
        """The user's objects that take part in reading the data and whose state is not saved, by name."""
        user = self.user_loader
        sampler: Any = user.batch_sampler if user.batch_sampler is not None else user.sampler
        if type(sampler) is BatchSampler:
            sampler = sampler.sampler
        parts: dict[str, Any] = {"dataset": user.dataset, "collate_fn": user.collate_fn}
        if type(sampler).__module__.partition(".")[0] not in ("torch", "hpcaccel", "torchdata"):
            parts["sampler"] = sampler
        saved = self.saved_parts
        return {name: part for name, part in parts.items() if not any(part is one for one in saved)}

    @property
    def saved_parts(self) -> list[Any]:
        """The user's objects whose state is part of the loader's state."""
        order = self._cursor.order
        if order is not None:
            return [*self.saved_generators, order.stateful]
        is_marked = self._stream.bookmarks is not None and is_stateful(self.user_loader.dataset)
        return [*self.saved_generators, *([self.user_loader.dataset] if is_marked else [])]

    @property
    def saved_generators(self) -> list[Any]:
        """The user's generators whose state is part of the loader's state."""
        found = self._cursor.generator
        return [] if found is None else [found]

    @property
    def doubt(self) -> str | None:
        """Reason why the batches after a resume may differ; None if no reason is known."""
        user, is_stream = self.user_loader, self._cursor.order is None
        if is_stream and not self._stream.is_known:
            return f"it is unknown how {type(user).__qualname__} reads its data"
        if not user.num_workers:
            return None
        # Workers draw from copies of the generators, and each new worker starts with a new copy. A resume repeats the
        # draws if each epoch has its own workers, which read the epoch from its beginning.
        repeated = is_stream and not user.persistent_workers and not self._stream.is_stateful_loader
        saved = self.saved_generators if repeated else []
        copied = [
            name
            for part, thing in self.own_parts.items()
            if part != "sampler"
            for name, generator in generators_in(thing, part)
            if not any(generator is one for one in saved)
        ]
        if not copied:
            return None
        return f"workers draw from copies of generators that are not saved in checkpoints: {', '.join(copied)}"


class ReadingLoader(LoaderExactness):
    """Opens the iterator over this rank's batches at the cursor's position."""

    slice_fn: SliceFn | None
    _group: RankGroup
    _dispatcher: Dispatcher | None
    _inner: DataLoader[Any]
    _generator: torch.Generator

    def _release(self) -> None:
        """Release the epoch's order, so that its memory is free before the next order is drawn."""
        if self._part is not None:
            self._latest = RankBatch(None, self.batch_samples, self.valid_in_batch)
            self._part = None
            self._plan.release()

    def _open(self) -> Iterator[Any]:
        """This rank's batches from the cursor's position on."""
        cursor = self._cursor
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(cursor.epoch)
        self._part = None
        epoch_seed = mix(cursor.seed, cursor.epoch)
        self._seed_workers(epoch_seed)
        if self._dispatcher is not None:
            return self._announce(dispatched(self._read_for_all, self._dispatcher, self._sharing, self.slice_fn))
        if cursor.order is not None:
            self._part = cursor.order.part(self._sharing, cursor.start)
            return self._read(self._part, self._sharing)
        batches = self._stream.open(cursor, epoch_seed, shown=self._group.is_main)
        if self._stream.is_own:
            return self._announce(with_last(batches))
        return self._announce(picked(batches, self._sharing, self.slice_fn, self._stream.fill))

    def _seed_workers(self, epoch_seed: int) -> None:
        """Seed the workers: anew in each epoch unless they persist, and equally on ranks that read the same data."""
        seed = mix(self._cursor.seed) if self.persistent_workers else epoch_seed
        self._generator.manual_seed(seed if self._cursor.order is None else mix(seed, self._group.data_rank))

    def _read(self, part: RankPart, sharing: Sharing, *, before: Any = None) -> Iterator[Any]:
        cursor = self._cursor
        width = sharing.width if cursor.unit == "samples" else 1
        self._plan.begin(
            part,
            seed=mix(cursor.seed, cursor.epoch),
            first=cursor.start + sharing.rank * (width or 1),
            step=(sharing.round if cursor.unit == "samples" else None) or sharing.raw,
            before=before,
        )
        with signals_held():
            return iter(self._inner)

    def _read_for_all(self) -> tuple[Iterator[Any], FillBatch]:
        """Returns the whole batches that rank 0 reads for all ranks, and what fills up incomplete rounds."""
        cursor, sharing = self._cursor, self._sharing
        if cursor.order is not None:
            alone = Sharing(rank=0, size=1, batch_size=sharing.batch_size, drop_last=sharing.drop_last)
            part = cursor.order.part(alone, cursor.start)
            before = self._first_batch(part, alone) if self._fills_up(part) else None
            source = drawn_apart(self._read(part, alone, before=before), workers=self.num_workers > 0)
            return source, FillBatch(None if before is None else next(source))
        assert self._dispatcher is not None
        batches = self._stream.open(cursor, mix(cursor.seed, cursor.epoch), shown=True, meanwhile=self._dispatcher.wait)
        return (item.batch for item in batches), self._stream.fill

    def _fills_up(self, part: RankPart) -> bool:
        """Whether the epoch's first batch lies before the cursor, and may be needed to fill up the last round."""
        cursor, sharing = self._cursor, self._sharing
        if not (cursor.start and sharing.even) or sharing.drop_last:
            return False
        if part.total is None:
            return True
        length = cursor.order.length if cursor.order is not None and cursor.order.is_flat else None
        return length is None or sharing.round is None or length % sharing.round != 0

    def _first_batch(self, part: RankPart, alone: Sharing) -> Any:
        """The indices of the epoch's first batch; None if there is none. Does not use up a ``WalkedPart``."""
        assert self._cursor.order is not None
        return (
            part.take_first() if isinstance(part, WalkedPart) else next(iter(self._cursor.order.part(alone, 0)), None)
        )

    def _announce(self, batches: Announced) -> Iterator[Any]:
        attributes = self.__dict__  # DataLoader's __setattr__ is slow
        for item, is_last in batches:
            if item is None:
                continue
            attributes["_latest"], attributes["at_last_batch"] = item, is_last
            yield item.batch
