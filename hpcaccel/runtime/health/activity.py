"""What a rank is doing, for its heartbeat: ``Activity``, the objects that report it, and ``RankStatus``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from hpcaccel.runtime.health.stragglers import OwnTime

__all__ = ["Activity", "ActivitySource", "RankStatus"]


class Activity(NamedTuple):
    """Fields of ``rank_records.Beat`` that depend on the training."""

    phase: str
    step: int
    first_step: int
    batches: int = 0
    calls: int = 0
    waits_in: str | None = None
    left: str | None = None


class ActivitySource(Protocol):
    """What a heartbeat needs from its training. The heartbeat's thread calls ``activity``, which must not block."""

    own_time: OwnTime | None
    stack_counts: bool
    """Whether a change of the main thread's stack counts as progress, for a training whose batches are not counted."""

    def activity(self) -> Activity: ...


class RankStatus:
    """Current activity of this rank, for its heartbeat."""

    def __init__(self) -> None:
        self.phase = "starting"
        """One of the phases of ``rank_records.Beat``."""
        self.first_step = 0
        """Step at which the current loop started."""
        self.left_at: str | None = None
        """``file:line`` where the script last left a loop early; None if it has trained since."""

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set ``phase`` inside the context. The previous phase is restored at the end, but not after an exception."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def train(self, step: int) -> None:
        """Record that a loop starts to train at ``step``."""
        self.phase, self.first_step = "training", step
