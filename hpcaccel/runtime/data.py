"""Prepared loaders: each rank's part of the data, and a cursor that finds the way back into the middle of an epoch."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from hpcaccel.runtime.accumulation import Accumulation
from hpcaccel.runtime.determinism import mix
from hpcaccel.runtime.ops import to_device
from hpcaccel.runtime.process_group import Group
from hpcaccel.runtime.sampling import Order, own_part
from hpcaccel.runtime.stop import WorkerInit, signals_held

__all__ = ["LoopHooks", "PreparedLoader"]


class LoopHooks(Protocol):
    """What a loader tells the training loop, and asks it."""

    finishing: bool

    def step_is_over(self) -> None:
        """Everything that belongs to the last optimizer step has been done."""

    def restore_rng(self) -> None:
        """The generators go back to where the checkpoint has them, as the batch after it is about to be drawn."""


class PreparedLoader(DataLoader[Any]):
    """A face for the user's DataLoader: ``len`` and iteration are those of this rank's part.

    Every iteration is an epoch of its own, also after one that was left by ``break``. With workers the global
    generators are seeded batch by batch, so that random augmentation is the same after a resume.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        group: Group,
        accumulation: Accumulation,
        hooks: LoopHooks,
        seed: int,
        even_batches: bool = True,
    ) -> None:
        # DataLoader.__init__ would check and build everything anew; this is the user's loader with another iteration.
        self.__dict__.update(loader.__dict__)
        self.user_loader = loader
        self.at_last_batch = False
        self.trains = False
        """Whether optimizer steps follow its batches; such a loader ends early when the training is to finish."""
        self._group = group
        self._accumulation = accumulation
        self._hooks = hooks
        self._even = even_batches
        self._cursor = Cursor(None if isinstance(loader.dataset, IterableDataset) else Order(loader, seed))
        self._seed = seed
        self._generator = torch.Generator()
        self._plan = _Plan(self._cursor, group, even=even_batches, drop_last=bool(loader.drop_last))
        self._inner = self._build_inner()

    def __len__(self) -> int:
        batches = len(self.user_loader)
        size, rank = self._group.world_size, self._group.rank
        if self.user_loader.drop_last:
            return batches // size
        if self._even:
            return (batches + size - 1) // size
        return batches // size + (rank < batches % size)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        cut = False
        self._cursor.begin()
        try:
            batches = self._open()
            while True:
                self._hooks.step_is_over()
                if self._hooks.finishing and self.trains:
                    cut = True  # the cursor stays where it is, for whoever takes this training up again
                    return
                try:
                    batch, self.at_last_batch = next(batches)
                except StopIteration:
                    return
                self._cursor.used += self._group.world_size
                self._accumulation.took_batch_from(self)
                yield to_device(batch, self._group.device) if self._group.device.type != "cpu" else batch
        finally:
            self._accumulation.ended(self)
            if not cut:
                self._cursor.running = False

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is, in a form that any number of ranks can take up."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursor.load_state_dict(state)

    def _build_inner(self) -> DataLoader[Any]:
        user = self.user_loader
        common: dict[str, Any] = {
            "num_workers": user.num_workers,
            "collate_fn": user.collate_fn,
            "pin_memory": user.pin_memory,
            "timeout": user.timeout,
            "multiprocessing_context": user.multiprocessing_context,
            "generator": self._generator,
        }
        if user.num_workers:
            common |= {
                "worker_init_fn": WorkerInit(user.worker_init_fn),
                "prefetch_factor": user.prefetch_factor,
                "persistent_workers": user.persistent_workers,
            }
        if self._cursor.order is None:
            return DataLoader(user.dataset, batch_size=user.batch_size, drop_last=user.drop_last, **common)
        data: Any = _PlannedData(user.dataset)
        plan: Any = self._plan
        if self._cursor.order.auto_collation:
            return DataLoader(data, batch_sampler=plan, **common)
        return DataLoader(data, batch_size=None, sampler=plan, **common)

    def _open(self) -> Iterator[tuple[Any, bool]]:
        """This rank's batches from the cursor on, each with whether it is the last one."""
        cursor = self._cursor
        self._generator.manual_seed(mix(self._seed, cursor.epoch, self._group.rank))
        with signals_held():
            source = iter(self._inner)
        if cursor.order is not None:
            batches = ((batch, self._plan.is_last(number)) for number, batch in enumerate(source))
            if cursor.resumed:
                self._hooks.restore_rng()
            return batches
        if cursor.used:
            warnings.warn(
                f"resuming an iterable dataset: {cursor.used} batches are read and thrown away, because such a "
                "dataset cannot be asked for the sample in the middle",
                stacklevel=3,
            )
        part = own_part(
            source,
            rank=self._group.rank,
            world_size=self._group.world_size,
            start=cursor.used,
            batch_size=None,
            even=self._even,
            drop_last=bool(self.user_loader.drop_last),
        )
        return _with_last(part)


class Cursor:
    """Which epoch, and how many raw batches of it all ranks together have used (not prefetched)."""

    def __init__(self, order: Order | None) -> None:
        self.order = order
        self.epoch = -1
        self.used = 0
        self.running = False
        self.resumed = False
        self._take_up = False
        self._generator_state: torch.Tensor | None = None

    def begin(self) -> None:
        """The next epoch begins, or the one goes on in whose middle the checkpoint was made."""
        self.resumed, self._take_up = self._take_up, False
        if not self.resumed:
            self.epoch += 1
            self.used = 0
        self.running = True
        if self.order is not None:
            self._generator_state = self.order.generator_state
            self.order.begin(self.epoch)

    def state_dict(self) -> dict[str, Any]:
        state = None
        if self.order is not None:
            state = self._generator_state if self.running else self.order.generator_state
        return {
            "epoch": self.epoch,
            "used": self.used,
            "running": self.running,
            "seed": None if self.order is None else self.order.seed,
            "generator": state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.used = state["epoch"], state["used"]
        self._take_up = state["running"]
        self.running = state["running"]
        if self.order is not None:
            self.order.seed = state["seed"]
            if self.order.users_generator is not None and state["generator"] is not None:
                self.order.users_generator.set_state(state["generator"])
                self._generator_state = state["generator"]


class _Plan:
    """The index batches that the inner loader fetches: this rank's part of the epoch, from the cursor on."""

    def __init__(self, cursor: Cursor, group: Group, *, even: bool, drop_last: bool) -> None:
        self._cursor = cursor
        self._group = group
        self._even = even
        self._drop_last = drop_last
        self._count: int | None = None

    def is_last(self, number: int) -> bool:
        """Whether the ``number``-th batch since the iteration began is its last."""
        return self._count is not None and number == self._count - 1

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        order, group, start = self._cursor.order, self._group, self._cursor.used
        assert order is not None
        self._count = None
        part = own_part(
            order,
            rank=group.rank,
            world_size=group.world_size,
            start=start,
            batch_size=order.batch_size if order.auto_collation else None,
            even=self._even,
            drop_last=self._drop_last,
        )
        for number, (indices, last) in enumerate(_with_last(part)):
            if last:
                self._count = number + 1
            raw = start + number * group.world_size + group.rank
            yield mix(order.seed, self._cursor.epoch, raw), indices


class _PlannedData:
    """The user's dataset, asked with the seed and the indices of a planned batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, planned: tuple[int, Any]) -> Any:
        indices = _seeded(planned)
        if getattr(self._dataset, "__getitems__", None):
            return self._dataset.__getitems__(indices)
        return [self._dataset[index] for index in indices]

    def __getitem__(self, planned: tuple[int, Any]) -> Any:
        return self._dataset[_seeded(planned)]


def _seeded(planned: tuple[int, Any]) -> Any:
    """The indices. In a worker, whose generators start anew with each epoch and each resume, the batch's seed first."""
    seed, indices = planned
    if torch.utils.data.get_worker_info() is not None:
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
    return indices


def _with_last(items: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    try:
        item = next(items)
    except StopIteration:
        return
    for following in items:
        yield item, False
        item = following
    yield item, True
