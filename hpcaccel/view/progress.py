"""Progress of work that reads or writes many bytes."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, TextIO

from hpcaccel.core.formatting import clean, size

__all__ = ["Transfer"]

LINE_SECONDS = 10.0
"""Interval between progress lines without a terminal. Work that takes less time prints none."""


class Transfer:
    """Context manager that shows the progress passed to ``update``, which is thread-safe."""

    def __init__(self, what: str, *, stream: TextIO | None = None) -> None:
        self._what = clean(what)
        self._stream = sys.stderr if stream is None else stream
        self._lock = threading.Lock()
        self._shown_at: float | None = None
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Transfer:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            console = Console(file=self._stream, highlight=False)
            columns = (TextColumn("{task.description}"), BarColumn(28), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(self._what, total=None)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Show ``done`` of ``total`` bytes."""
        with self._lock:
            if self._bar is not None:
                self._bar.update(self._task, completed=done, total=total)
            elif self._shown_at is None:
                self._shown_at = time.monotonic()
            elif time.monotonic() - self._shown_at > LINE_SECONDS:
                self._shown_at = time.monotonic()
                print(f"{self._what}: {size(done)} of {size(total)}", file=self._stream, flush=True)
