"""Progress of work that reads or writes many bytes: a bar on a terminal, else a line now and then; on stderr."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any, TextIO

from hpcaccel.view.formatting import clean, size

__all__ = ["Transfer"]

LINE_SECONDS = 10.0
"""Where there is no terminal; what takes less is not spoken of at all."""


class Transfer:
    """A context in which ``tell`` says how far the work is. Threads may tell together."""

    def __init__(self, what: str, *, stream: TextIO | None = None) -> None:
        self._what = clean(what)
        self._stream = sys.stderr if stream is None else stream
        self._lock = threading.Lock()
        self._said: float | None = None
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

    def tell(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes."""
        with self._lock:
            if self._bar is not None:
                self._bar.update(self._task, completed=done, total=total)
            elif self._said is None:
                self._said = time.monotonic()
            elif time.monotonic() - self._said > LINE_SECONDS:
                self._said = time.monotonic()
                print(f"{self._what}: {size(done)} of {size(total)}", file=self._stream, flush=True)
