"""The heartbeat: a thread that writes this rank's progress to a file at regular intervals, for the supervisor.

The training thread does no work for it: the heartbeat only reads counters that exist anyway. Heartbeats stop if the
process is suspended or has ended, or if C code holds the GIL.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hpcaccel.core.durable_files import make_folder, write_json
from hpcaccel.core.process_identity import node_name
from hpcaccel.core.rank_records import Beat
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import SaveRequests
from hpcaccel.runtime.health.step_profiler import StepProfiler
from hpcaccel.runtime.health.stragglers import StragglerWatch
from hpcaccel.runtime.health.thread_stacks import StackDumper, ThreadPosition, thread_position

if TYPE_CHECKING:
    from hpcaccel.runtime.health.stragglers import OwnTime

__all__ = ["Activity", "ActivitySource", "Heartbeat", "RankStatus", "save_requests", "start_heartbeat", "step_profiler"]

INTERVAL_SECONDS = 10.0
"""Time between two beats. HPCACCEL_HEARTBEAT_SECONDS overrides it."""
WRITES_PER_SECOND = 100
"""Maximum number of writes by all ranks together: in large runs each rank writes less often, to spare the file
system."""
STEP_TIME_BEATS = 30
"""Maximum number of beats from which the time per step is computed."""

_running: Heartbeat | None = None


class Activity(NamedTuple):
    """Fields of ``rank_records.Beat`` that depend on the training."""

    phase: str
    step: int
    first_step: int
    batches: int = 0
    calls: int = 0
    waits_in: str | None = None
    left: str | None = None
    gpu: str = ""


class ActivitySource(Protocol):
    """Interface of a training for its heartbeat. The heartbeat's thread calls ``activity``, which must not block."""

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
        """``file:line`` where the script last left a loop early; None if it never did or has trained since."""

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set ``phase`` inside the context. The previous phase is restored at the end, but not after an exception."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def train(self, step: int) -> None:
        """Record that a training loop starts at ``step``."""
        self.phase, self.first_step = "training", step


class Heartbeat:
    """The heartbeat of a process, shared by all its trainings; ``source`` is the current training."""

    def __init__(self, run: RunDir, attempt: int, *, rank: int, world_size: int) -> None:
        self.source: ActivitySource | None = None
        self._stack_changes = 0
        self._stack = 0
        self._path = run.heartbeats(attempt) / f"{rank}.json"
        self._rank = rank
        self._host = node_name()
        self._main = threading.main_thread().ident or 0
        wanted = float(os.environ.get("HPCACCEL_HEARTBEAT_SECONDS", INTERVAL_SECONDS))
        self.interval_seconds = max(wanted, world_size / WRITES_PER_SECOND)
        self._number = 0
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEP_TIME_BEATS)
        """Pairs (time, step), one for each heartbeat at which the step number had changed."""
        self._warned = False
        self._stacks = StackDumper(run.stacks(attempt), rank)
        self._stragglers = StragglerWatch(run, attempt) if rank == 0 else None
        self.save_requests = SaveRequests(run) if rank == 0 else None
        self.profiler = StepProfiler(run, attempt, rank=rank)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcaccel-heartbeat", daemon=True)

    def start(self) -> None:
        make_folder(self._path.parent)
        self._stacks.register()
        self._thread.start()
        # Registered before the training's exit handlers and so called after them: they can take long, and the heartbeat
        # must continue meanwhile.
        atexit.register(self._stopped.set)

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running; False in a forked child of the process that started the thread."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self.interval_seconds if self._number else 0):
                self._write(self._beat())
                self._stacks.dump_if_requested()
                if self.save_requests is not None:
                    self.save_requests.poll()
                self.profiler.poll()
                if self._stragglers is not None and self.source is not None:
                    self._stragglers.check(self.source.own_time)
        except BaseException:
            # The supervisor ignores ranks without a heartbeat file, so a failed heartbeat cannot end a training.
            self._path.unlink(missing_ok=True)
            raise

    def _beat(self) -> Beat:
        self._number += 1
        position = thread_position(sys._current_frames().get(self._main))
        source = self.source
        if source is None:
            return self._record(position, Activity(phase="starting", step=0, first_step=0))
        now = source.activity()
        if now.step > now.first_step and (not self._steps or self._steps[-1][1] != now.step):
            self._steps.append((time.monotonic(), now.step))
        if source.stack_counts:
            self._stack_changes += position.fingerprint != self._stack
            self._stack = position.fingerprint
            now = now._replace(batches=now.batches + self._stack_changes)
        return self._record(position, now)

    def _record(self, position: ThreadPosition, now: Activity) -> Beat:
        return Beat(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            number=self._number,
            time=time.time(),
            interval_seconds=self.interval_seconds,
            step_seconds=self._step_seconds(),
            waits=position.waits,
            site=position.site,
            stack=position.fingerprint,
            thread=f"0x{self._main:016x}",
            **now._asdict(),
        )

    def _step_seconds(self) -> float | None:
        if len(self._steps) < 2:
            return None
        (first, before), (last, after) = self._steps[0], self._steps[-1]
        return round((last - first) / (after - before), 6) if after > before else None

    def _write(self, beat: Beat) -> None:
        try:
            write_json(self._path, to_dict(beat), sync=False)
        except OSError as error:
            _touch(self._path)
            if not self._warned:
                self._warned = True
                print(f"hpcaccel: the heartbeat file could not be written: {error}", file=sys.stderr, flush=True)


def _touch(path: Path) -> None:
    """Update the file's modification time, which works on a full disk and shows that this rank is alive."""
    try:
        os.utime(path)
    except OSError:
        return  # the caller reports the write error


def start_heartbeat(run: RunDir | None, attempt: int) -> Heartbeat | None:
    """Start this process's heartbeat unless it is running already, and return it. Returns None if this process is not a
    rank of a run, or if the heartbeat cannot be started."""
    global _running
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if run is None or rank is None or world_size is None:
        return None
    if _running is None or not _running.is_alive:
        _running = Heartbeat(run, attempt, rank=int(rank), world_size=int(world_size))
        try:
            _running.start()
        except OSError as error:
            print(f"hpcaccel: the heartbeat could not be started: {error}", file=sys.stderr, flush=True)
            _running = None
    return _running


def save_requests() -> SaveRequests | None:
    """The requests to save that rank 0's heartbeat has found; None on other ranks and outside of a run."""
    return None if _running is None else _running.save_requests


def step_profiler() -> StepProfiler | None:
    """The profiler of this rank's steps, for ``hpcaccel profile``; None outside of a run."""
    return None if _running is None else _running.profiler
