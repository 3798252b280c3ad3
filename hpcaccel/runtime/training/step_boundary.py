"""``StepBoundary``: when an optimizer step is over, and which call reports it.

A step is *done* when the first prepared optimizer has stepped (even if fp16 skipped it), or at ``checkpoint()`` if
no optimizer was prepared. It is *over* when everything that belongs to it has run: other optimizers, schedulers,
metrics. A checkpoint may be saved only then. The first of these calls after a step reports that it is over:

- a prepared loader, when an iteration starts, its next batch is read or its data ends;
- ``checkpoint()``;
- ``epochs()`` and ``steps()``, when their next item is read;
- the next backward pass, if none of the above reports it (see ``is_over_at_backward``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hpcaccel.runtime.training.loop_context import LoopContext

__all__ = ["StepBoundary"]

MOST_UNREPORTED_STEPS = 100
"""Number of unreported steps after which the backward pass reports them in any case."""


class StepBoundary:
    """Counts steps, and determines when a step is over."""

    def __init__(self, context: LoopContext) -> None:
        self.reported_step = 0
        """The last step that was reported as over."""
        self.has_begun = False
        """Whether a step of this process has been reported as over."""
        self.script_reports = False
        """Whether the script calls ``checkpoint`` and thereby reports the end of each step."""
        self.has_unagreed_steps = False
        """Whether a ``held`` context has ended and the ranks have not yet agreed on saves and stops for its steps."""
        self._counters = context.counters
        self._prepared = context.prepared
        self._in_use = context.in_use
        self._exactness = context.exactness
        self._clock = context.clock
        self._status = context.status
        self.holds = 0
        """Number of ``held`` contexts that have been entered and not left yet. Inside them nothing is reported."""
        self.has_left = False
        """Whether the script has left its loop early since the last step."""
        self.stepped: set[int] = set()
        """Ids of the optimizers, other than the first, that have stepped since the last report."""

    # -- a step is done --------------------------------------------------------------------------------------------

    def count_step(self, *, is_prepared: bool = True) -> None:
        """Count a step of the first optimizer. If it is prepared, mark the loader of its batch as trained on.

        Its work is not divided into functions: each call costs about a microsecond here, because a step of the model
        has evicted the code from the processor's caches.
        """
        counters, exactness, source = self._counters, self._exactness, self._in_use.current
        counters.step = step = counters.step + 1
        if self.has_left:
            self.has_left = False
            self._status.left_at = None
        self._clock.count(step)
        if source is None and exactness.is_unfed:
            exactness.steps += 1
            exactness.has_gradients = False
            return
        exactness.stepped(step, counters.epoch)
        if source is not None and is_prepared:
            source.trains = True

    def other_optimizer_stepped(self, optimizer: object) -> None:
        """Record the step of a prepared optimizer other than the first; it is not counted."""
        self.stepped.add(id(optimizer))
        self._exactness.has_gradients = False

    # -- a step is over --------------------------------------------------------------------------------------------

    def is_over_at_backward(self) -> bool:
        """Whether a backward pass that starts now has to report the last step.

        It has to if the script uses neither a prepared loader nor ``checkpoint()`` and all optimizers have stepped (a
        GAN has several). After ``MOST_UNREPORTED_STEPS`` it has to in any case: a loader that has not returned a batch
        for that many steps is not the training's loader, and a stop must not wait for it.
        """
        if self._counters.step - self.reported_step >= MOST_UNREPORTED_STEPS:
            return True
        source = self._in_use.current
        if self.script_reports or (source is not None and source.given_at_step >= 0):
            return False
        return len(self.stepped) >= len(self._prepared.optimizers) - 1

    def begin_at(self, step: int) -> None:
        """Continue from the checkpoint of ``step``."""
        self.reported_step = step

    # -- ranks with different numbers of steps ---------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """Context in which nothing is reported. At its end all steps inside it count as reported, even on ranks that
        did no step: a rank that reported a step later would wait for ranks that have nothing to report."""
        self.holds += 1
        try:
            yield
        finally:
            self.holds -= 1
            self.reported_step = self._counters.step
        self.has_unagreed_steps = not self.holds
