"""``AttemptClock``: times of an attempt (``timing.json``) and its last step (the file ``step``), written by rank 0.

``timing.json`` is written at each event (such as group formed, checkpoint loaded, first step, save, end), and between
events at the end of a step, at intervals that grow from 1 to 60 seconds.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from hpcaccel.core.durable_files import make_folder, read_json, read_lines, write_json
from hpcaccel.core.process_identity import started_at
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.step_counter import StepCounter
from hpcaccel.runtime.rank_logger import TRAINING_LOG
from hpcaccel.runtime.training.step_times import StepTimes, median_of

if TYPE_CHECKING:
    from hpcaccel.core.rank_records import Timing

__all__ = ["AttemptClock"]

logger = logging.getLogger(TRAINING_LOG)

FIRST_SECONDS, MOST_SECONDS = 1.0, 60.0
"""Seconds between two writes while no event occurs: ``FIRST_SECONDS`` at first, doubled up to ``MOST_SECONDS``."""


class AttemptClock:
    """Records the times of one training. On ranks other than 0, and without a run directory, nothing is written.

    Args:
        begun: when ``Accelerator()`` or ``stop_gate()`` was called, in seconds since the epoch.
        formed: when the process group was initialised.
        waited_for_data: returns the total time for which the script has waited for batches; None if that is unknown.
    """

    def __init__(
        self,
        run: RunDir | None,
        attempt: int,
        *,
        begun: float,
        formed: float,
        waited_for_data: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._steps = StepTimes()
        self._saves: list[float] = []
        self._end_step_at = self._steps.end_at
        self._has_stepped = False
        self._step = 0
        self._waited_for_data = waited_for_data
        self._waited_before = 0.0
        """Time for which the script had waited for batches at the end of the first step."""
        self._stalled = 0.0
        """Seconds for which saves have blocked training since the last step."""
        self._every = FIRST_SECONDS
        self._write_at = 0.0
        self._prepared = self._over = False
        self.count: Callable[[int], None] = self._count_first
        """Record that a step is done. The number is written at once, so that it survives if the rank is killed."""
        self._counter: StepCounter | None = None
        """Created at the first step."""
        self._times: Timing
        if run is not None:
            self._start(run, begun, formed)

    def _start(self, run: RunDir, begun: float, formed: float) -> None:
        from hpcaccel.core.rank_records import Timing
        from hpcaccel.core.records import from_dict

        before = read_json(run.timing(self._attempt - 1))
        slowest = None if before is None else from_dict(Timing, before).slowest_save_seconds
        self._times = Timing(
            process_started=started_at(os.getpid()), imported=begun, formed=formed, slowest_save_seconds=slowest
        )
        self._write()
        atexit.register(self.end)  # also after an exception

    # -- events -----------------------------------------------------------------------------------------------------

    def prepared(self) -> None:
        """Record that all objects are prepared. Only the first call has an effect."""
        if not self._prepared:
            self._prepared = True
            self._note(prepared=time.time())

    def begin(self, *, resumed_step: int, resumed_from: str | None, total_steps: int | None) -> None:
        """Write ``progress.json``: where the training starts, and its total number of steps, if known."""
        if self._run is None:
            return
        from hpcaccel.core.rank_records import Progress
        from hpcaccel.core.records import to_dict

        path = self._run.progress(self._attempt)
        make_folder(path.parent)
        progress = Progress(
            resumed_step=resumed_step, resumed_from=resumed_from, total_steps=total_steps, time=time.time()
        )
        write_json(path, to_dict(progress))

    def loaded(self, step: int) -> None:
        """Record that the checkpoint of ``step`` was loaded. Without a checkpoint ``step`` is 0.

        A load after the first step, such as loading the best model for an evaluation, does not change the step from
        which this attempt was resumed.
        """
        if not self._has_stepped:
            self._note(loaded=time.time(), resumed_step=step)
        self._step = step

    def _count_first(self, step: int) -> None:
        """``count`` until a step is in the file: create it, and write further steps without this function where the
        file is mapped into memory."""
        try:
            if self._counter is not None:
                self._counter.write(step)
            elif self._run is not None and not self._over:
                self._counter = StepCounter(self._run.step_counter(self._attempt))
                self._counter.write(step)
                if self._counter.is_mapped:
                    self.count = self._counter.write
        except OSError as error:
            self._give_up(error)

    def step_is_over(self, step: int) -> None:
        """Record the time since the last step, and write ``timing.json`` if a write is due."""
        if self._run is None:
            return
        now = monotonic()
        if step == self._step + 1 and now < self._write_at and not self._stalled:
            self._end_step_at(now)
            self._step = step
        elif self._has_stepped:
            self._steps_are_over(now, step)
        else:
            self._first(now, step)

    def _steps_are_over(self, now: float, step: int) -> None:
        count = step - self._step
        if count > 0:
            self._steps.add((now - self._steps.last_end - self._stalled) / count)
        self._steps.begin_at(now)
        self._step, self._stalled = step, 0.0
        if now >= self._write_at:
            self._every = min(2 * self._every, MOST_SECONDS)
            self._write_at = now + self._every
            self._write()

    def _first(self, now: float, step: int) -> None:
        start, self._stalled = self._stalled, 0.0
        self._has_stepped, self._step = True, step
        self._steps.begin_at(now)
        self._write_at = now + self._every
        self._waited_before = self._waited_for_data() or 0.0
        self._note(first_step_time=time.time(), stall_before_first_step=start)
        if self._run is not None:
            from hpcaccel.runtime.training.loaded_modules import write_modules

            write_modules(self._run, self._attempt)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context that measures a save during which training stands still."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.saved(time.monotonic() - start)

    def saved(self, took: float) -> None:
        """Record a save that has blocked training for ``took`` seconds."""
        self._saves.append(took)
        if self._run is not None:
            slowest = max(took, self._times.slowest_save_seconds or 0.0)
            self._stand_still(took, saves=len(self._saves), slowest_save_seconds=slowest)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context that measures how long training waits for a background save."""
        start = time.monotonic()
        try:
            yield
        finally:
            if self._run is not None:
                self._stand_still(time.monotonic() - start)

    def stalled(self, seconds: float) -> None:
        """Record that a snapshot in memory has blocked training. Writes nothing, because snapshots may be frequent."""
        if self._run is not None:
            self._stalled += seconds
            before = self._times
            self._times = replace(
                before,
                stall_seconds=before.stall_seconds + seconds,
                snapshot_seconds=(before.snapshot_seconds or 0.0) + seconds,
            )

    @property
    def median_step_seconds(self) -> float | None:
        """Median duration of this attempt's steps in seconds, on rank 0; None if unknown."""
        return self._steps.median

    def _stand_still(self, seconds: float, **facts: float) -> None:
        self._stalled += seconds
        self._note(stall_seconds=self._times.stall_seconds + seconds, **facts)

    def end(self) -> None:
        """Record the end of the training. Later steps are not written to the file ``step``."""
        if not self._over:
            self._over = True
            self._note()
            self._close_counter()

    # -- expectation -------------------------------------------------------------------------------------------------

    @property
    def expected_save_seconds(self) -> float | None:
        """Expected seconds from the start of a save to its commit, on rank 0; None if unknown.

        The larger of two medians over this attempt's saves: of the times for which they blocked training, and of the
        times recorded in ``saves.jsonl`` for saves that wrote everything, without deliberate waiting. Before this
        attempt's first save, the slowest save of earlier attempts.
        """
        if self._run is None:
            return None
        from hpcaccel.core.rank_records import whole_save_seconds

        written = whole_save_seconds(line for line, _ in read_lines(self._run.saves(self._attempt)))
        known = [median_of(times) for times in (self._saves, written) if times]
        return max(known, default=self._times.slowest_save_seconds)

    # -- writing -----------------------------------------------------------------------------------------------------

    def _note(self, **facts: float) -> None:
        if self._run is not None:
            self._times = replace(self._times, **facts)  # type: ignore[arg-type]
            self._write()

    def _write(self) -> None:
        assert self._run is not None
        if self._has_stepped:
            waited = self._waited_for_data()
            self._times = replace(
                self._times,
                last_step=self._step,
                last_step_time=time.time() - (time.monotonic() - self._steps.last_end),
                step_seconds=self._steps.median,
                slowest_step_seconds=self._steps.largest or None,
                save_seconds=median_of(self._saves) if self._saves else None,
                stall_after_last_step=self._stalled,
                data_wait_seconds=None if waited is None else waited - self._waited_before,
            )
        from hpcaccel.core.records import to_dict

        path = self._run.timing(self._attempt)
        try:
            make_folder(path.parent)
            write_json(path, to_dict(self._times), sync=False)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Log the error and stop writing, without raising: on a full disk the next save raises a clearer error."""
        assert self._run is not None
        file = error.filename or self._run.step_counter(self._attempt)
        logger.info("cannot write %s (%s): the run's report will have no newer step times", file, error.strerror)
        self._run = None
        self._close_counter()

    def _close_counter(self) -> None:
        self.count = self._count_first
        if self._counter is not None:
            self._counter.close()
            self._counter = None
