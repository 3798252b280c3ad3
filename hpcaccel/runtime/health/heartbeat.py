"""A thread that says every few seconds how far this rank is, for the supervisor, which cannot look into it.

The training thread does nothing for it: the numbers are those that it counts anyway, read from outside. A rank whose
beats stop has been stopped itself, or runs C code that does not give Python's lock back.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from hpcaccel.core.process_identity import node_name
from hpcaccel.core.records import Beat, to_dict
from hpcaccel.core.run_dir import RunDir, make_folder, write_json
from hpcaccel.runtime.health.position import Position, position_of
from hpcaccel.runtime.health.stack_dump import Stacks
from hpcaccel.runtime.health.stragglers import StragglerWatch

if TYPE_CHECKING:
    from hpcaccel.runtime.training.loop import Loop

__all__ = ["Heartbeat", "start_heartbeat"]

INTERVAL_SECONDS = 10.0
"""Between two beats. HPCACCEL_HEARTBEAT_SECONDS overrides it."""
WRITES_A_SECOND = 100
"""At most so many by all ranks together: large runs beat more slowly, for the file system's sake."""
REMEMBERED = 30
"""So many beats tell how long a step takes."""

_running: Heartbeat | None = None


class Heartbeat:
    """One a process, through all its trainings; ``loop`` is the one that goes on."""

    def __init__(self, run: RunDir, attempt: int, *, rank: int, world_size: int) -> None:
        self.loop: Loop | None = None
        self._path = run.heartbeats(attempt) / f"{rank}.json"
        self._rank = rank
        self._host = node_name()
        self._main = threading.main_thread().ident or 0
        wanted = float(os.environ.get("HPCACCEL_HEARTBEAT_SECONDS", INTERVAL_SECONDS))
        self.interval_seconds = max(wanted, world_size / WRITES_A_SECOND)
        self._number = 0
        self._seen: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        """When which step had been done, at those beats that found a new one."""
        self._complained = False
        self._stacks = Stacks(run.stacks(attempt), rank)
        self._stragglers = StragglerWatch(run, attempt) if rank == 0 else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="hpcaccel-heartbeat", daemon=True)

    def start(self) -> None:
        make_folder(self._path.parent)
        self._stacks.register()
        self._thread.start()
        # Registered before the training's own ends, and so called after them: leaving can take long, too.
        atexit.register(self._over.set)

    @property
    def is_alive(self) -> bool:
        """Not in a process that was forked from the one that started it."""
        return self._thread.is_alive()

    def _beat_on(self) -> None:
        try:
            while not self._over.wait(self.interval_seconds if self._number else 0):
                self._write(self._beat())
                self._stacks.answer()
                if self._stragglers is not None and self.loop is not None:
                    self._stragglers.look(self.loop.own_time)
        except BaseException:
            # A training must not be ended because this thread has failed: no sign at all is no bad sign.
            self._path.unlink(missing_ok=True)
            raise

    def _beat(self) -> Beat:
        self._number += 1
        position = position_of(sys._current_frames().get(self._main))
        loop = self.loop
        if loop is None:
            return self._of(position, phase="starting", step=0)
        step = loop.step
        if step > loop.first_step and (not self._seen or self._seen[-1][1] != step):
            self._seen.append((time.monotonic(), step))
        rollcall = loop.rollcall
        return self._of(
            position,
            phase="evaluating" if loop.activity.phase == "training" and loop.evaluates else loop.activity.phase,
            step=step,
            first_step=loop.first_step,
            batches=loop.batches,
            calls=0 if rollcall is None else sum(list(rollcall.entered.values())),
            waits_in=None if rollcall is None else rollcall.waits_in,
            left=loop.activity.left_at,
        )

    def _of(
        self,
        position: Position,
        *,
        phase: str,
        step: int,
        first_step: int = 0,
        batches: int = 0,
        calls: int = 0,
        waits_in: str | None = None,
        left: str | None = None,
    ) -> Beat:
        return Beat(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            number=self._number,
            time=time.time(),
            interval_seconds=self.interval_seconds,
            phase=phase,
            step=step,
            first_step=first_step,
            batches=batches,
            calls=calls,
            step_seconds=self._step_seconds(),
            waits_in=waits_in,
            left=left,
            waits=position.waits,
            site=position.site,
            stack=position.fingerprint,
            thread=f"0x{self._main:016x}",
        )

    def _step_seconds(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        return round((last - first) / (after - before), 6) if after > before else None

    def _write(self, beat: Beat) -> None:
        try:
            write_json(self._path, to_dict(beat), sync=False)
        except OSError as error:
            _touch(self._path)
            if not self._complained:
                self._complained = True
                print(f"hpcaccel: no sign of life can be written: {error}", file=sys.stderr, flush=True)


def _touch(path: Path) -> None:
    """On a full disk a new time is all that still can be written, and enough to show that this rank lives."""
    try:
        os.utime(path)
    except OSError:
        return  # said by the caller


def start_heartbeat(run: RunDir | None, attempt: int) -> Heartbeat | None:
    """The heartbeat of this process; None where no supervisor has started it as a rank."""
    global _running
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if run is None or rank is None or world_size is None:
        return None
    if _running is None or not _running.is_alive:
        _running = Heartbeat(run, attempt, rank=int(rank), world_size=int(world_size))
        try:
            _running.start()
        except OSError as error:
            print(f"hpcaccel: no sign of life can be given: {error}", file=sys.stderr, flush=True)
            _running = None
    return _running
