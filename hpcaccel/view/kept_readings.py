"""Readings of metrics files that a process keeps: a later look at the same run reads only the new lines."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.runs.attempts import Metrics

__all__ = ["KeptReadings", "metrics_of"]

T = TypeVar("T")

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


_METRICS = KeptReadings(Metrics, most=MOST_RUNS)


@contextmanager
def metrics_of(run: RunDir) -> Iterator[Metrics]:
    """The newest values of ``run``, up to date. No other thread uses them meanwhile."""
    with _METRICS.of(run) as metrics:
        metrics.read()
        yield metrics
