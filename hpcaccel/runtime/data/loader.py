"""Prepared loaders: each rank's part of the data, and a cursor that finds the way back into the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from hpcaccel.runtime.data.batch_shards import LoaderShard, seedable_order
from hpcaccel.runtime.data.cursor import Cursor
from hpcaccel.runtime.data.dispatch import Dispatcher
from hpcaccel.runtime.data.generators import (
    capture,
    check_rng_types,
    drawn_apart,
    put_back,
    synchronise,
)
from hpcaccel.runtime.data.global_batches import Fill, SliceFn, Told
from hpcaccel.runtime.data.inner_loader import Plan, planned_loader
from hpcaccel.runtime.data.iterable import Bookmarks
from hpcaccel.runtime.data.loader_exactness import LoaderPromise
from hpcaccel.runtime.data.placement import mover
from hpcaccel.runtime.data.sampling import Order
from hpcaccel.runtime.data.sharding import Part, Sharing, WalkedPart
from hpcaccel.runtime.data.streaming import Announced, announced, dispatched, generator_of, make_stream, picked
from hpcaccel.runtime.distributed.process_group import Group
from hpcaccel.runtime.training.accumulation import LoadersInUse
from hpcaccel.runtime.training.determinism import mix
from hpcaccel.runtime.training.stop_agreement import signals_held

__all__ = ["DispatchedLoader", "LoopHooks", "PreparedLoader", "is_dispatched", "make_loader"]


class LoopHooks(Protocol):
    """What a loader tells the training loop, and asks it."""

    finishing: bool

    @property
    def step(self) -> int:
        """Optimizer steps done."""

    @property
    def finished_epochs_are_over(self) -> bool:
        """Whether an epoch that the checkpoint has at its very end is not taken up any more."""

    def step_is_over(self) -> None:
        """Everything that belongs to the last optimizer step has been done."""

    def restore_rng(self) -> None:
        """The generators go back to where the checkpoint has them, as the batch after it is about to be drawn."""

    def loop_is_entered(self) -> None:
        """Batches that are trained on are about to be read."""

    def loop_is_left(self) -> None:
        """The script breaks off in the midst of the batches that it trains on."""


class PreparedLoader(LoaderPromise):
    """A face for the user's DataLoader: ``len`` and iteration are those of this rank's part.

    Every iteration is an epoch of its own, also after one that was left by ``break``. With workers the global
    generators are seeded batch by batch, so that random augmentation is the same after a resume.

    Args:
        seed: the same on every rank; of the order of samplers without a generator of their own.
        even_batches: all ranks get equally many batches: the epoch's first samples fill up the last ones.
        split_batches: the loader's batches are divided among the ranks, instead of each rank getting whole ones.
        dispatch_batches: rank 0 reads for all. None: for iterable datasets, if batches are put on the device.
        put_on_device: move batches to the rank's device.
        rng_types: generators whose state rank 0 gives to all when an iteration begins. That of the sampler needs none
            of it: it is the same on all ranks once it is prepared.
        slice_fn: ``slice_fn(batch, slice, process_index=r, num_processes=P)`` divides what rank 0 has read.
        seedable: the order is that of a generator seeded with ``seed`` plus the epoch.
        stateful: have torchdata's StatefulDataLoader read an iterable dataset.

    Raises:
        RuntimeMisuse: data that is sharded already; batches that cannot be split; an unknown kind of generator.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        group: Group,
        in_use: LoadersInUse,
        hooks: LoopHooks,
        seed: int,
        even_batches: bool = True,
        split_batches: bool = False,
        dispatch_batches: bool | None = None,
        put_on_device: bool = True,
        non_blocking: bool = False,
        rng_types: Sequence[Any] = (),
        slice_fn: SliceFn | None = None,
        seedable: bool = False,
        stateful: bool = False,
    ) -> None:
        # DataLoader.__init__ would check and build everything anew; this is the user's loader with another iteration.
        self.__dict__.update(loader.__dict__)
        streamed = isinstance(loader.dataset, IterableDataset)
        wanted = is_dispatched(loader, dispatch_batches=dispatch_batches, put_on_device=put_on_device)
        self.__dict__.pop("batch_sampler")  # see the property
        self.user_loader = loader
        self.at_last_batch = False
        self.split_batches = split_batches
        self.dispatch_batches = wanted and group.world_size > 1
        self.device = group.device if put_on_device else None
        self.rng_types = check_rng_types(rng_types)
        self.passes = 0
        """How often this rank has iterated to the end."""
        self._group, self._in_use, self._hooks = group, in_use, hooks
        self._place = mover(group.device, non_blocking=non_blocking) if put_on_device else None
        self._seedable = seedable
        self._skip: int | None = None
        self._told = Told(None, None)
        self._part: Part | None = None
        self._generator = torch.Generator()
        order = None if streamed else Order(loader, seed, seedable=seedable)
        self._sharing = sharing = Sharing(
            rank=group.data_rank,
            size=group.data_size,
            batch_size=loader.batch_size if order is None else order.batch_size,
            even=even_batches,
            split=split_batches,
            drop_last=bool(loader.drop_last) if order is None else order.drop_last,
        )
        unit = "samples" if order is None or order.is_flat else "batches"
        self._cursor = Cursor(
            order,
            stride=(sharing.round if unit == "samples" else None) or sharing.raw,
            unit=unit,
            seed=seed,
            generator=generator_of(loader.dataset),
        )
        self.slice_fn = slice_fn
        self._dispatcher = Dispatcher(group, to_device=put_on_device) if self.dispatch_batches else None
        if order is None:
            self._stream = make_stream(
                loader, sharing, self._generator, stateful=stateful, ready_made=self.dispatch_batches
            )
        else:
            self._plan = Plan(seeded=bool(loader.num_workers) or self.dispatch_batches)
            self._inner = planned_loader(loader, self._plan, self._generator)

    # -- what scripts ask a loader ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        sharing, order = self._sharing, self._cursor.order
        if order is not None and order.is_flat and not self.dispatch_batches and order.length is not None:
            assert sharing.round is not None
            assert sharing.width is not None
            total = sharing.count(order.length, sharing.round, sharing.width)
        else:
            total = sharing.count(len(self.user_loader), sharing.raw, 1)
        return max(total - (self._skip or 0), 0)

    @property
    def even_batches(self) -> bool:
        return self._sharing.even

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._sharing = replace(self._sharing, even=value)
        if self._cursor.order is None:
            self._stream.share(self._sharing)

    @property
    def bookmark_seconds(self) -> float:
        """How often a stream with a state is asked for it; what was read since is read again after a resume."""
        return self._bookmarks().seconds

    @bookmark_seconds.setter
    def bookmark_seconds(self, value: float) -> None:
        self._bookmarks().seconds = value

    def _bookmarks(self) -> Bookmarks:
        found = None if self._cursor.order is not None else self._stream.bookmarks
        if found is None:
            raise AttributeError("this loader reads no stream that has a state")
        return found

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        """The user's own where this rank reads all of it; else this rank's part of it, which knows ``even_batches``."""
        own: Any = self.user_loader.batch_sampler
        order = self._cursor.order
        if order is None or own is None:
            return own
        if self._seedable:
            own = seedable_order(own, order.seed, self.iteration)
        shared = self._sharing.size > 1 and not self.dispatch_batches
        return LoaderShard(self, own, self._sharing) if shared else own

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is that of ``epoch``; right after a resume into the middle of it, the rest of it."""
        self._cursor.go_to(epoch)

    def skipping(self, batches: int) -> PreparedLoader:
        """This loader without the first ``batches`` of each epoch on this rank, which are not read where they need not
        be."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._skip = (self._skip or 0) + batches
        return view

    # -- iterating --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        cut = False
        cursor, hooks = self._cursor, self._hooks
        generators = capture()
        synchronise(self.rng_types, self._group)
        self.at_last_batch = False
        iteration = cursor.begin(skip=self._skip, end=self._end, over=hooks.finished_epochs_are_over)
        try:
            hooks.step_is_over()
            if cursor.trains:
                hooks.loop_is_entered()
            if hooks.finishing and cursor.trains:
                cut = True  # the cursor stays where it is, for whoever takes this training up again
                return
            took, step_is_over, place = self._in_use.took_batch_from, hooks.step_is_over, self._place
            batches = self._open()
            if cursor.resumed:
                # What opening draws has been drawn before the checkpoint. Another loader may give batches already.
                put_back(generators)
                hooks.restore_rng()
            for number, batch in enumerate(batches, 1):
                cursor.rounds = number
                cursor.step = hooks.step
                if self._part is not None and number == self._part.total:
                    self.at_last_batch = True
                took(self)
                yield batch if place is None else place(batch)
                step_is_over()
                if hooks.finishing and cursor.trains:
                    cut = True
                    return
            self.passes += 1
            if not cursor.trains:
                self._in_use.passes += 1
        except GeneratorExit:
            if cursor.trains:
                hooks.loop_is_left()
            raise
        finally:
            if cursor.is_current(iteration):
                self._in_use.ended(self)
                if not cut:
                    self._let_go()
                    cursor.finish(iteration)

    @property
    def _end(self) -> int | None:
        """Units after which nothing is left of an epoch."""
        length = None if self._cursor.order is None else self._cursor.order.length
        return length if length is None or not self._sharing.drop_last else length - length % self._cursor.stride

    def _let_go(self) -> None:
        """Hold the epoch's order no longer: the next one is drawn before this loader opens again."""
        if self._part is not None:
            self._told = Told(None, self.batch_samples, self.valid_in_batch)
            self._part = None
            self._plan.release()

    def _open(self) -> Iterator[Any]:
        """This rank's batches from the cursor on."""
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
        told = self._stream.open(cursor, epoch_seed, shown=self._group.is_main)
        if self._stream.is_own:
            return self._announce(announced(told))
        return self._announce(picked(told, self._sharing, self.slice_fn, self._stream.fill))

    def _seed_workers(self, epoch_seed: int) -> None:
        """What workers find in ``get_worker_info().seed``: another one in each epoch, unless they stay the same, and
        alike on ranks that read the same."""
        seed = mix(self._cursor.seed) if self.persistent_workers else epoch_seed
        self._generator.manual_seed(seed if self._cursor.order is None else mix(seed, self._group.data_rank))

    def _read(self, part: Part, sharing: Sharing, *, before: Any = None) -> Iterator[Any]:
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

    def _read_for_all(self) -> tuple[Iterator[Any], Fill]:
        """Whole batches, on the rank that reads for the others, and what unfinished rounds are filled up with."""
        cursor, sharing = self._cursor, self._sharing
        if cursor.order is not None:
            alone = Sharing(rank=0, size=1, batch_size=sharing.batch_size, drop_last=sharing.drop_last)
            part = cursor.order.part(alone, cursor.start)
            before = self._first_batch(part, alone) if self._fills_up(part) else None
            source = drawn_apart(self._read(part, alone, before=before), workers=self.num_workers > 0)
            return source, Fill(None if before is None else next(source))
        assert self._dispatcher is not None
        told = self._stream.open(cursor, mix(cursor.seed, cursor.epoch), shown=True, meanwhile=self._dispatcher.wait)
        return (item.batch for item in told), self._stream.fill

    def _fills_up(self, part: Part) -> bool:
        """Whether the epoch's first batch may be wanted at its end, and is not read any more."""
        cursor, sharing = self._cursor, self._sharing
        if not (cursor.start and sharing.even) or sharing.drop_last:
            return False
        if part.total is None:
            return True
        length = cursor.order.length if cursor.order is not None and cursor.order.is_flat else None
        return length is None or sharing.round is None or length % sharing.round != 0

    def _first_batch(self, part: Part, alone: Sharing) -> Any:
        """The indices of the epoch's first batch; a part that is walked can be begun only once."""
        assert self._cursor.order is not None
        return (
            part.take_first() if isinstance(part, WalkedPart) else next(iter(self._cursor.order.part(alone, 0)), None)
        )

    def _announce(self, batches: Announced) -> Iterator[Any]:
        known = self.__dict__  # DataLoader's __setattr__ is slow
        for told, is_last in batches:
            if told is None:
                continue
            known["_told"], known["at_last_batch"] = told, is_last
            yield told.batch

    # -- saving -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is, in a form that any number of ranks can take up."""
        cursor = self._cursor
        running = cursor.running and self._is_in_use()
        stream = self._stream.bookmark(cursor.used) if running and cursor.order is None else None
        return cursor.state_dict(running=running) | {"stream": stream, "reading": self.reading}

    def _is_in_use(self) -> bool:
        """Whether its iteration was not left without a word: an iterator that somebody holds, and asks no more."""
        current: Any = self._in_use.current
        if self._cursor.trains or not self._cursor.rounds or getattr(current, "_cursor", None) is self._cursor:
            return True
        return self._hooks.step - self._cursor.step <= 1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            RuntimeMisuse: the place was counted in another unit.
        """
        self._cursor.load_state_dict(state)
        self.__dict__["changes"] = self.changes_since(state.get("reading", {}))


class DispatchedLoader(PreparedLoader):
    """One of which rank 0 reads the batches, for all."""


def make_loader(loader: DataLoader[Any], **options: Any) -> PreparedLoader:
    """``loader``, prepared; see ``PreparedLoader`` for the options."""
    asked = {name: options[name] for name in ("dispatch_batches", "put_on_device") if name in options}
    return (DispatchedLoader if is_dispatched(loader, **asked) else PreparedLoader)(loader, **options)


def is_dispatched(loader: DataLoader[Any], *, dispatch_batches: bool | None = None, put_on_device: bool = True) -> bool:
    """Whether rank 0 is to read for all, where there are several ranks."""
    if dispatch_batches is None:
        return isinstance(loader.dataset, IterableDataset) and put_on_device
    return dispatch_batches
