"""Gradient accumulation: which micro-batches end in an optimizer step.

Every ``steps``-th micro-batch does, and so does the last one of the loader in use, so that no gradients leak from one
epoch into the next.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import nn

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.training.gradient_sync import NoSync, no_sync

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.process_group import Group
    from hpcaccel.runtime.health.stragglers import OwnTime

__all__ = ["Accumulation", "LoadersInUse", "MicroBatch", "Source"]


class Source(Protocol):
    """A loader that knows whether the batch it gave last was its last one, and is told that it feeds the training."""

    at_last_batch: bool
    trains: bool

    @property
    def given_at_step(self) -> int:
        """Optimizer steps that were done when it gave its last batch."""

    @property
    def identity(self) -> int:
        """The same number for all views of one loader."""

    @property
    def place(self) -> tuple[int, int]:
        """Which iteration of it this is, and how many batches it has given in it."""


class LoadersInUse:
    """The prepared loaders that are being iterated in this process, whichever Accelerator has prepared them."""

    def __init__(self) -> None:
        self.current: Source | None = None
        """The loader that gave the last batch. An iteration that was left half-way steps back as soon as another
        loader gives one."""
        self.passes = 0
        """How many loaders have been read to their ends without training on them."""
        self.batches = 0
        """How many batches prepared loaders have given, of any kind."""
        self.own_time: OwnTime | None = None
        """To be told when a batch has come, where that ends this rank's own part of a step."""
        self._warned = False
        self._sources: list[Source] = []

    @property
    def sources(self) -> tuple[Source, ...]:
        """The loaders that are being iterated, outermost first."""
        return tuple(self._sources)

    def took_batch_from(self, source: Source) -> None:
        self.batches += 1
        if self.own_time is not None:
            self.own_time.batch_has_come()
        if self.current is not source:
            self.ended(source)
            self._sources.append(source)
            self.current = source

    def ended(self, source: Source) -> None:
        if source in self._sources:
            self._sources.remove(source)
            self.current = self._sources[-1] if self._sources else None

    def clear(self) -> None:
        """No loader is being iterated any more."""
        self._sources.clear()
        self.current = None

    def warn_of_uneven_passes(self, group: Group) -> None:
        """Say once, on rank 0, that some ranks have read a prepared loader to its end and others have not."""
        if group.is_main and not self._warned:
            warnings.warn(
                "a prepared DataLoader was read to its end on some ranks only, which saw no more than their own part, "
                f"1/{group.data_size} of the data. Read it on all ranks and use gather_for_metrics(), or leave out of "
                "prepare() what one rank is to read alone",
                stacklevel=6,
            )
        self._warned = True


class Accumulation:
    """Counts micro-batches. ``is_boundary`` is True where an optimizer step belongs, and outside of accumulation.

    Args:
        steps: micro-batches for one optimizer step.
        sync_with_dataloader: the last batch of the loader in use is a boundary, and counting begins anew.
        sync_each_batch: gradients are shared among the ranks in every micro-batch, which saves memory when the model
            is sharded. A lone rank has nothing to keep back.
        adjust_scheduler: whether prepared schedulers count the micro-batches between steps.
        loaders: those of the process, which all its Accelerators share.
    """

    def __init__(
        self,
        steps: int,
        *,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
        adjust_scheduler: bool = True,
        loaders: LoadersInUse | None = None,
    ) -> None:
        self.steps = steps
        self.sync_with_dataloader = sync_with_dataloader
        self.sync_each_batch = sync_each_batch
        self.adjust_scheduler = adjust_scheduler
        self.loaders = LoadersInUse() if loaders is None else loaders
        self.is_boundary = True
        self.looked = False
        """Whether the first loss has been looked at: scripts that divide it themselves are told."""
        self.inside = 0
        """How many micro-batches the script is inside of."""
        self._done: dict[int, int] = {}

    def set_steps(self, steps: int) -> None:
        """
        Raises:
            RuntimeMisuse: not a whole number of at least 1.
        """
        if not isinstance(steps, int) or steps < 1:
            raise RuntimeMisuse(f"gradient_accumulation_steps={steps!r} must be a whole number of at least 1")
        self.steps = steps

    def begin_micro_batch(self, whose: int = 0) -> None:
        """A micro-batch begins, counted for ``whose`` alone: the halves of a GAN, each accumulated in a context of its
        own, do not count each other's."""
        done = self._done.get(whose, 0) + 1
        source = self.loaders.current
        if done >= self.steps or (source is not None and source.at_last_batch and self.sync_with_dataloader):
            self.is_boundary = True
            self._done[whose] = 0
        else:
            self.is_boundary = False
            self._done[whose] = done

    def count_anew(self) -> None:
        """Forget the micro-batches since the last optimizer step, and which loaders are being iterated."""
        self._done.clear()
        self.is_boundary = True
        self.loaders.clear()


class MicroBatch:
    """The context of one micro-batch: gradients of ``models`` stay on this rank unless an optimizer step follows.

    Args:
        others: accumulations that are where ``accumulation`` is.
    """

    __slots__ = ("_accumulation", "_held", "_models", "_others")

    def __init__(
        self, accumulation: Accumulation, models: tuple[nn.Module, ...], others: tuple[Accumulation, ...] = ()
    ) -> None:
        self._accumulation = accumulation
        self._models = models
        self._others = others
        self._held: Sequence[NoSync] = ()

    def __enter__(self) -> None:
        accumulation, models = self._accumulation, self._models
        accumulation.begin_micro_batch(id(models[0]) if models else 0)
        accumulation.inside += 1
        for other in self._others:
            other.is_boundary = accumulation.is_boundary
            other.inside += 1
        if models and not (accumulation.is_boundary or accumulation.sync_each_batch):
            self._held = [no_sync(model) for model in models]
            for held in self._held:
                held.__enter__()

    def __exit__(self, *error: object) -> None:
        self._accumulation.inside -= 1
        for other in self._others:
            other.inside -= 1
        for held in self._held:
            held.__exit__(*error)
