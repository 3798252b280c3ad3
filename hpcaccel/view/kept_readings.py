"""Readings of runs that a process keeps: a later reading of the same run reads only new data."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.runs.attempts import Metrics

__all__ = ["KeptReadings", "KeptRows", "changed_at", "metrics_of"]

T = TypeVar("T")

CHECK_SECONDS = 60.0
"""Kept rows are compared with all files of their run again after this time."""
LEAST_CHECKS = 200
"""Of all kept rows, a tenth is checked again in one call, or this number if that is more."""
MOST_RUNS = 500
"""Maximum number of runs whose newest values are kept."""


class KeptReadings(Generic[T]):
    """Readings by run directory, for several threads. The reading that was used longest ago is dropped first.

    Args:
        create: makes the empty reading of a run.
        most: maximum total size of the readings.
        size: size of a reading, measured after each use. Default: 1.
    """

    def __init__(
        self, create: Callable[[RunDir], T], *, most: int, size: Callable[[T], int] = lambda reading: 1
    ) -> None:
        self._create = create
        self._most = most
        self._size = size
        self._lock = threading.Lock()
        self._kept: OrderedDict[Path, tuple[T, threading.Lock]] = OrderedDict()
        self._sizes: dict[Path, int] = {}

    @contextmanager
    def of(self, run: RunDir) -> Iterator[T]:
        """The reading of ``run``, which no other thread uses meanwhile."""
        with self._lock:
            if run.path not in self._kept:
                self._kept[run.path] = (self._create(run), threading.Lock())
            self._kept.move_to_end(run.path)
            reading, lock = self._kept[run.path]
        with lock:
            yield reading
            size = self._size(reading)
        with self._lock:
            if run.path in self._kept:
                self._sizes[run.path] = size
            while len(self._kept) > 1 and sum(self._sizes.values()) > self._most:
                dropped, _ = self._kept.popitem(last=False)
                self._sizes.pop(dropped, None)


class KeptRows(Generic[T]):
    """Rows of ended runs that a process keeps. ``lock`` must be held."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._rows: dict[Path, tuple[T | None, int, float]] = {}

    def has_seen(self, run: RunDir) -> bool:
        """Whether ``keep`` has been called for ``run``."""
        return run.path in self._rows

    def keep(self, run: RunDir, row: T | None, changed: int) -> None:
        """Keep the row of an ended run; ``row`` is None for other runs. ``changed`` is the result of ``changed_at``
        before the run was read."""
        self._rows[run.path] = (row, changed, time.monotonic())

    def known(self, runs: Sequence[RunDir]) -> dict[Path, T]:
        """The kept rows of ``runs`` by path. Rows whose run's folder has changed are left out and, in turn, those that
        were read long ago."""
        now, found, old = time.monotonic(), {}, 0
        most = max(LEAST_CHECKS, len(runs) // 10)
        for run in runs:
            kept = self._rows.get(run.path)
            if kept is None or kept[0] is None or kept[1] != changed_at(run):
                continue
            if now - kept[2] > CHECK_SECONDS and old < most:
                old += 1
                continue
            found[run.path] = kept[0]
        return found


def changed_at(run: RunDir) -> int:
    """When the run's folder itself was last changed, in nanoseconds since the epoch; 0 if it does not exist. Each
    submission of a job replaces a file in it."""
    try:
        return os.stat(run.path).st_mtime_ns
    except OSError:
        return 0


_METRICS = KeptReadings(Metrics, most=MOST_RUNS)


@contextmanager
def metrics_of(run: RunDir) -> Iterator[Metrics]:
    """The newest values of ``run``, up to date. No other thread uses them meanwhile."""
    with _METRICS.of(run) as metrics:
        metrics.read()
        yield metrics
