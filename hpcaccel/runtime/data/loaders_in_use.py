"""The prepared loaders that this process is iterating over, and the interfaces between loaders and training loop."""

from __future__ import annotations

import warnings
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.process_group import RankGroup
    from hpcaccel.runtime.health.stragglers import OwnTime

__all__ = ["BatchSource", "LoadersInUse", "LoopHooks"]


class BatchSource(Protocol):
    """The part of a prepared loader that the training loop uses."""

    trains: bool

    @property
    def at_last_batch(self) -> bool:
        """Whether the loader has returned the last batch of its iteration."""

    @property
    def given_at_step(self) -> int:
        """How many optimizer steps had been done when the loader returned its latest batch; -1 if the loader is not
        prepared, and does not report when a step is over."""

    @property
    def identity(self) -> int:
        """A number that is the same for all views of one loader."""

    @property
    def place(self) -> tuple[int, int]:
        """The number of the current iteration, and how many batches were returned in it."""


class LoopHooks(Protocol):
    """The part of the training loop that a loader uses."""

    finishing: bool

    @property
    def step(self) -> int:
        """Number of optimizer steps done."""

    @property
    def finished_epochs_are_over(self) -> bool:
        """Whether an epoch that was complete in the checkpoint counts as done."""

    def step_is_over(self) -> None:
        """Called when the script starts an iteration or requests a batch: by then, the last optimizer step is over."""

    def restore_rng(self) -> None:
        """Restore the checkpoint's random states. Called right before the first batch after a resume."""

    def loop_is_entered(self) -> None:
        """Called when the script starts another iteration over a loader that is trained on."""

    def loop_is_left(self) -> None:
        """Called when the script leaves an iteration over training batches early."""


class LoadersInUse:
    """The prepared loaders, of all Accelerators of this process, that the script is iterating over."""

    def __init__(self) -> None:
        self.current: BatchSource | None = None
        """The loader in use: the last of ``sources``; None if there is none."""
        self.passes = 0
        """Number of complete iterations over loaders that were not trained on."""
        self.batches = 0
        """Number of batches returned by all prepared loaders."""
        self.own_time: OwnTime | None = None
        """Measures this rank's own time, and is notified of each batch; None if nothing is measured."""
        self._waited = 0.0
        self._requested_at = 0.0
        self._warned = False
        self._sources: list[BatchSource] = []

    def waited_seconds(self) -> float | None:
        """Total time for which the script has waited for batches; None before the first batch."""
        return self._waited if self.batches else None

    @property
    def sources(self) -> tuple[BatchSource, ...]:
        """The loaders that the script is iterating over, in the order of their latest batches (outer loops first)."""
        return tuple(self._sources)

    def requested_batch(self) -> None:
        """Record that the script waits for a batch from now on."""
        self._requested_at = perf_counter()

    def took_batch_from(self, source: BatchSource) -> None:
        self.batches += 1
        if self._requested_at:
            self._waited += perf_counter() - self._requested_at
            self._requested_at = 0.0
        if self.own_time is not None:
            self.own_time.batch_has_come()
        if self.current is not source:
            self.ended(source)
            self.began(source)

    def began(self, source: BatchSource) -> None:
        """Make ``source`` the loader in use before its first batch."""
        self._sources.append(source)
        self.current = source

    def ended(self, source: BatchSource) -> None:
        if source in self._sources:
            self._sources.remove(source)
            self.current = self._sources[-1] if self._sources else None

    def clear(self) -> None:
        """Remove all loaders that are being read. The counts are kept."""
        self._sources.clear()
        self.current = None

    def warn_of_uneven_passes(self, group: RankGroup) -> None:
        """Warn once, on rank 0, that only some ranks have read a prepared loader to its end."""
        if group.is_main and not self._warned:
            warnings.warn(
                "a prepared DataLoader was read to its end on some ranks only, and each of them got only its own part, "
                f"1/{group.data_size} of the data. Read it on all ranks and use gather_for_metrics(), or do not "
                "prepare() a DataLoader that only one rank reads",
                stacklevel=6,
            )
        self._warned = True
