"""What an attempt's time goes into: rank 0 takes it, and writes it down at a few moments.

Each step costs one look at the clock. The file is written when something happens (the group stands, the checkpoint is
loaded, the first step is over, a save, the end), and in between after 1, 2, 4 … 60 seconds.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcaccel.core.process_identity import started_at
from hpcaccel.core.run_dir import RunDir, make_folder, read_json, read_lines, write_json
from hpcaccel.runtime.training.step_counter import StepCounter

if TYPE_CHECKING:
    from hpcaccel.core.records import Timing

__all__ = ["Clock", "StepTimes"]

FIRST_SECONDS, MOST_SECONDS = 1.0, 60.0
"""Between two writes while nothing but steps happens."""
SAMPLE = 512


class StepTimes:
    """Median and largest of any number of durations, from a sample of bounded size that covers all of them evenly."""

    def __init__(self) -> None:
        self.largest = 0.0
        self._sample: list[float] = []
        self._stride = 1
        self._count = 0

    def add(self, seconds: float) -> None:
        if seconds > self.largest:
            self.largest = seconds
        self._count += 1
        if self._count % self._stride == 0:
            self._sample.append(seconds)
            if len(self._sample) == SAMPLE:
                del self._sample[::2]
                self._stride *= 2

    @property
    def median(self) -> float | None:
        return _median(self._sample) if self._sample else None


class Clock:
    """The times of one training. On other ranks than 0, and without a run directory, it only measures saves.

    Args:
        begun: when ``Accelerator()`` was called, in seconds since the epoch; ``formed``: when all ranks had met.
    """

    def __init__(self, run: RunDir | None, attempt: int, *, begun: float, formed: float) -> None:
        self._run = run
        self._attempt = attempt
        self._steps = StepTimes()
        self._saves: list[float] = []
        self._last: float | None = None
        self._step = 0
        self._stalled = 0.0
        """Since the last step."""
        self._every = FIRST_SECONDS
        self._write_at = 0.0
        self._prepared = self._over = False
        self._counter: StepCounter | None = None
        """Once a step has been done."""
        self._times: Timing
        if run is not None:
            self._begin(run, begun, formed)

    def _begin(self, run: RunDir, begun: float, formed: float) -> None:
        from hpcaccel.core.records import Timing, from_dict

        before = read_json(run.timing(self._attempt - 1))
        slowest = None if before is None else from_dict(Timing, before).slowest_save_seconds
        self._times = Timing(
            process_started=started_at(os.getpid()), imported=begun, formed=formed, slowest_save_seconds=slowest
        )
        self._write()
        atexit.register(self.end)  # also of a program that dies of an exception

    # -- what happens ------------------------------------------------------------------------------------------------

    def prepared(self) -> None:
        """The script is ready to load; the first time counts."""
        if not self._prepared:
            self._prepared = True
            self._note(prepared=time.time())

    def loaded(self, step: int) -> None:
        """The checkpoint of ``step`` is loaded; 0: there was none. What is loaded after the first step, say the best
        model for a last evaluation, is not where this attempt began."""
        if self._last is None:
            self._note(loaded=time.time(), resumed_step=step)
        self._step = step

    def count(self, step: int) -> None:
        """A step has been done. It is written at once, so that also a rank that is killed next has said so."""
        try:
            if self._counter is not None:
                self._counter.write(step)
            elif self._run is not None and not self._over:
                self._counter = StepCounter(self._run.step_counter(self._attempt))
                self._counter.write(step)
        except OSError as error:
            self._give_up(error)

    def tick(self, step: int) -> None:
        """A step is over."""
        if self._run is None:
            return
        now = time.monotonic()
        if self._last is None:
            self._first(now, step)
            return
        count = step - self._step
        if count > 0:
            self._steps.add((now - self._last - self._stalled) / count)
        self._last, self._step, self._stalled = now, step, 0.0
        if now >= self._write_at:
            self._every = min(2 * self._every, MOST_SECONDS)
            self._write_at = now + self._every
            self._write()

    def _first(self, now: float, step: int) -> None:
        start, self._stalled = self._stalled, 0.0
        self._last, self._step = now, step
        self._write_at = now + self._every
        self._note(first_step_time=time.time(), stall_before_first_step=start)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The training stands still inside, for a save."""
        start = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - start
            self._saves.append(took)
            if self._run is not None:
                slowest = max(took, self._times.slowest_save_seconds or 0.0)
                self._stand_still(took, saves=len(self._saves), slowest_save_seconds=slowest)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The training stands still inside, for a save that was begun before."""
        start = time.monotonic()
        try:
            yield
        finally:
            if self._run is not None:
                self._stand_still(time.monotonic() - start)

    def _stand_still(self, seconds: float, **facts: float) -> None:
        self._stalled += seconds
        self._note(stall_seconds=self._times.stall_seconds + seconds, **facts)

    def end(self) -> None:
        """The training is over, well or not: steps that come afterwards are not waited for."""
        if not self._over:
            self._over = True
            self._note()
            self._close_counter()

    # -- what is known -----------------------------------------------------------------------------------------------

    @property
    def expected_save_seconds(self) -> float | None:
        """How long a save takes until it is committed, as far as rank 0 knows; None where none was seen."""
        if self._run is None:
            return None
        written = [line["seconds"] for line, _ in read_lines(self._run.saves(self._attempt)) if "seconds" in line]
        known = [_median(times) for times in (self._saves, written) if times]
        return max(known, default=self._times.slowest_save_seconds)

    # -- writing -----------------------------------------------------------------------------------------------------

    def _note(self, **facts: float) -> None:
        if self._run is not None:
            self._times = replace(self._times, **facts)  # type: ignore[arg-type]
            self._write()

    def _write(self) -> None:
        assert self._run is not None
        if self._last is not None:
            self._times = replace(
                self._times,
                last_step=self._step,
                last_step_time=time.time() - (time.monotonic() - self._last),
                step_seconds=self._steps.median,
                slowest_step_seconds=self._steps.largest or None,
                save_seconds=_median(self._saves) if self._saves else None,
                stall_after_last_step=self._stalled,
            )
        try:
            self._put(self._run.timing(self._attempt))
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A full disk ends the next save, with a better reason than these files."""
        assert self._run is not None
        file = error.filename or self._run.step_counter(self._attempt)
        print(f"hpcaccel: {file} cannot be written ({error.strerror}): the report lacks it", flush=True)
        self._run = None
        self._close_counter()

    def _close_counter(self) -> None:
        if self._counter is not None:
            self._counter.close()
            self._counter = None

    def _put(self, path: Path) -> None:
        from hpcaccel.core.records import to_dict

        make_folder(path.parent)
        write_json(path, to_dict(self._times), sync=False)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
