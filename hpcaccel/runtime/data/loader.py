"""``PreparedLoader``: reads this rank's part of the data. Its position can be saved in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hpcaccel.runtime.data.batch_samplers import LoaderShard, seedable_order
from hpcaccel.runtime.data.cursor import Cursor
from hpcaccel.runtime.data.dispatch import Dispatcher
from hpcaccel.runtime.data.global_batches import RankBatch, SliceFn
from hpcaccel.runtime.data.inner_loader import LoaderPlan, planned_loader
from hpcaccel.runtime.data.iterable import Bookmarks
from hpcaccel.runtime.data.loader_base import ReadingLoader
from hpcaccel.runtime.data.loaders_in_use import LoadersInUse, LoopHooks
from hpcaccel.runtime.data.sampling import Order
from hpcaccel.runtime.data.sharding import RankPart, Sharing
from hpcaccel.runtime.data.streaming import generator_of, make_stream
from hpcaccel.runtime.distributed import xla_device
from hpcaccel.runtime.distributed.collectives.nested_ops import to_device
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.distributed.xla_device import BatchPlacer
from hpcaccel.runtime.rng.generators import (
    capture,
    check_rng_types,
    put_back,
    synchronise,
)

__all__ = ["DispatchedLoader", "PreparedLoader", "is_dispatched", "make_loader"]


class PreparedLoader(ReadingLoader):
    """The user's DataLoader, prepared: ``len`` and iteration cover this rank's part.

    Every iteration is a new epoch, even after a ``break``. Only the first iteration after a resume may continue the
    saved epoch instead. With workers, the global generators are seeded for each batch, so that random augmentation is
    the same after a resume.

    Args:
        seed: number from which all seeds are derived; the same on every rank. If the sampler has its own generator,
            that generator determines the order.
        even_batches: whether all ranks get the same number of batches. Repeated samples then fill up an incomplete last
            round.
        split_batches: whether to divide each of the loader's batches among the ranks, instead of assigning whole
            batches.
        dispatch_batches: whether rank 0 reads for all ranks. None means true for an iterable dataset with
            ``put_on_device``, else false.
        put_on_device: whether to move batches to the rank's device.
        rng_types: generators that are set to rank 0's state at the start of each iteration. The sampler's generator
            needs no communication: it has had the same state on all ranks since ``prepare()``.
        slice_fn: ``slice_fn(batch, slice, process_index=r, num_processes=P)`` returns rank r's part of a collated
            batch. Used where collated batches are divided among the ranks.
        seedable: whether to draw the order from a generator seeded with ``seed + epoch``, not from the sampler's own
            generator.
        stateful: whether to read an iterable dataset with torchdata's StatefulDataLoader.

    Raises:
        RuntimeMisuse: the data is already sharded; the batches cannot be split; ``rng_types`` has an unknown entry.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        group: RankGroup,
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
        # DataLoader.__init__ is not called: it would build the samplers again. Only iteration is different.
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
        """Number of complete iterations on this rank."""
        self._group, self._in_use, self._hooks = group, in_use, hooks
        moves = put_on_device and group.device.type != "cpu"
        self._place = _placing(group.device, non_blocking=non_blocking) if moves else None
        self._seedable = seedable
        self._skip: int | None = None
        self._latest = RankBatch(None, None)
        self._part: RankPart | None = None
        self._generator = torch.Generator()
        order = None if streamed else Order(loader, seed, seedable=seedable)
        self._sharing = sharing = _sharing(loader, order, group, even=even_batches, split=split_batches)
        self._cursor = _cursor(loader, order, sharing, seed)
        self.slice_fn = slice_fn
        self._dispatcher = Dispatcher(group, to_device=put_on_device) if self.dispatch_batches else None
        if order is None:
            self._stream = make_stream(
                loader, sharing, self._generator, stateful=stateful, ready_made=self.dispatch_batches
            )
        else:
            self._plan = LoaderPlan(seeded=bool(loader.num_workers) or self.dispatch_batches)
            self._inner = planned_loader(loader, self._plan, self._generator)

    # -- the interface of a DataLoader -------------------------------------------------------------------------------

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
        """Minimum seconds between saved states of a stateful stream. A resume reads again what followed the last saved
        state."""
        return self._bookmarks().seconds

    @bookmark_seconds.setter
    def bookmark_seconds(self, value: float) -> None:
        self._bookmarks().seconds = value

    def _bookmarks(self) -> Bookmarks:
        found = None if self._cursor.order is not None else self._stream.bookmarks
        if found is None:
            raise AttributeError(
                "this loader has no bookmark_seconds, which requires an iterable dataset with state_dict() and "
                "num_workers=0, or torchdata's StatefulDataLoader"
            )
        return found

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]
        """This rank's part of the user's batch sampler. For a stream, with a single data rank, or if rank 0 reads for
        all ranks, the whole batch sampler."""
        own: Any = self.user_loader.batch_sampler
        order = self._cursor.order
        if order is None or own is None:
            return own
        if self._seedable:
            own = seedable_order(own, order.seed, self.iteration)
        shared = self._sharing.size > 1 and not self.dispatch_batches
        return LoaderShard(self, own, self._sharing) if shared else own

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next epoch. If the checkpoint was saved during this epoch, only the
        remaining batches are read."""
        self._cursor.go_to(epoch)

    # -- iterating --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        cut = False
        cursor, hooks, in_use, place = self._cursor, self._hooks, self._in_use, self._place
        generators = capture()
        synchronise(self.rng_types, self._group)
        self.at_last_batch = False
        iteration = cursor.begin(skip=self._skip, end=self._end, over=hooks.finished_epochs_are_over)
        try:
            hooks.step_is_over()
            if cursor.trains:
                hooks.loop_is_entered()
            if hooks.finishing and cursor.trains:
                cut = True  # the position remains: a resumed training continues here
                return
            took, requested, step_is_over = in_use.took_batch_from, in_use.requested_batch, hooks.step_is_over
            batches = self._open()
            if cursor.resumed:
                # Undo the draws of _open(): the states in the checkpoint already include them. If another loader has
                # returned batches since the load, restore_rng() does nothing: the states from before _open() remain.
                put_back(generators)
                hooks.restore_rng()
            requested()
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
                requested()
            self.passes += 1
            if isinstance(place, BatchPlacer):
                xla_device.sync()
            if not cursor.trains:
                in_use.passes += 1
        except GeneratorExit:
            if cursor.trains:
                hooks.loop_is_left()
            raise
        finally:
            if cursor.is_current(iteration):
                in_use.ended(self)
                if not cut:
                    self._release()
                    cursor.finish(iteration)

    @property
    def _end(self) -> int | None:
        """Number of units in a whole epoch, without an incomplete round that is dropped; None if unknown."""
        length = None if self._cursor.order is None else self._cursor.order.length
        return length if length is None or not self._sharing.drop_last else length - length % self._cursor.stride

    # -- saving -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The loader's position, from which any number of ranks can resume."""
        cursor = self._cursor
        running = cursor.running and self._is_in_use()
        stream = self._stream.bookmark(cursor.used) if running and cursor.order is None else None
        return cursor.state_dict(running=running) | {"stream": stream, "reading": self.reading}

    def _is_in_use(self) -> bool:
        """Whether the script still uses the running iteration. If this loader is neither trained on nor the loader in
        use, the iteration counts as abandoned two optimizer steps after its latest batch."""
        current: Any = self._in_use.current
        if self._cursor.trains or not self._cursor.rounds or getattr(current, "_cursor", None) is self._cursor:
            return True
        return self._hooks.step - self._cursor.step <= 1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position from ``state_dict``.

        Raises:
            RuntimeMisuse: the position was saved in the middle of an epoch, and in another unit.
        """
        self._cursor.load_state_dict(state)
        self.__dict__["changes"] = self.changes_since(state.get("reading", {}))


def _placing(device: torch.device, *, non_blocking: bool) -> Callable[[Any], Any]:
    """The function that moves a batch to the device."""
    move = partial(to_device, device=device, non_blocking=non_blocking)
    return BatchPlacer(move) if device.type == "xla" else move


def _sharing(loader: DataLoader[Any], order: Order | None, group: RankGroup, *, even: bool, split: bool) -> Sharing:
    return Sharing(
        rank=group.data_rank,
        size=group.data_size,
        batch_size=loader.batch_size if order is None else order.batch_size,
        even=even,
        split=split,
        drop_last=bool(loader.drop_last) if order is None else order.drop_last,
    )


def _cursor(loader: DataLoader[Any], order: Order | None, sharing: Sharing, seed: int) -> Cursor:
    unit = "samples" if order is None or order.is_flat else "batches"
    stride = (sharing.round if unit == "samples" else None) or sharing.raw
    return Cursor(order, stride=stride, unit=unit, seed=seed, generator=generator_of(loader.dataset))


class DispatchedLoader(PreparedLoader):
    """A prepared loader whose data rank 0 reads for all ranks, if there are several ranks."""


def make_loader(loader: DataLoader[Any], **options: Any) -> PreparedLoader:
    """Prepare ``loader``; see ``PreparedLoader`` for the options."""
    requested = {name: options[name] for name in ("dispatch_batches", "put_on_device") if name in options}
    return (DispatchedLoader if is_dispatched(loader, **requested) else PreparedLoader)(loader, **options)


def is_dispatched(loader: DataLoader[Any], *, dispatch_batches: bool | None = None, put_on_device: bool = True) -> bool:
    """Whether rank 0 is to read the loader's data for all ranks. Has no effect with a single rank."""
    if dispatch_batches is None:
        return isinstance(loader.dataset, IterableDataset) and put_on_device
    return dispatch_batches
