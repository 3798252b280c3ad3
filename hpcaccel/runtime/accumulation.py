"""Gradient accumulation: which micro-batches end in an optimizer step.

Every ``steps``-th micro-batch does, and so does the last one of the loader in use, so that no gradients leak from one
epoch into the next.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Accumulation", "Source"]


class Source(Protocol):
    """A loader that knows whether the batch it gave last was its last one, and is told that it feeds the training."""

    at_last_batch: bool
    trains: bool


class Accumulation:
    """Counts micro-batches. ``is_boundary`` is True where an optimizer step belongs, and outside of accumulation."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.is_boundary = True
        self._done = 0
        self._sources: list[Source] = []

    def begin_micro_batch(self) -> None:
        self._done += 1
        source = self.current
        self.is_boundary = self._done >= self.steps or (source is not None and source.at_last_batch)
        if self.is_boundary:
            self._done = 0

    @property
    def current(self) -> Source | None:
        """The loader that gave the last batch. An iteration that was left half-way steps back as soon as another
        loader gives one."""
        return self._sources[-1] if self._sources else None

    def took_batch_from(self, source: Source) -> None:
        if self.current is not source:
            self.ended(source)
            self._sources.append(source)

    def ended(self, source: Source) -> None:
        if source in self._sources:
            self._sources.remove(source)
