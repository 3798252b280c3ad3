"""``MetricsLines``: buffered lines of a metrics file, and conversion of their values. Does not import torch."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import append_bytes

__all__ = ["MetricsLines", "flatten", "is_json_value", "plain", "warning_for"]

FLUSH_SECONDS = 1.0
"""Seconds after which a buffered line is written."""


class MetricsLines:
    """Buffers lines for up to a second, so that short steps do not wait for the file system.

    If no other line follows, a thread writes the buffer after a second, because the tuner of a sweep reads the file to
    decide whether a trial continues.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[dict[str, Any]] = []
        self._written = 0.0
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()
        atexit.register(self.write_out)  # runs after an exception too: the lines of the last second matter
        os.register_at_fork(after_in_child=self._drop)

    def add(self, line: dict[str, Any]) -> None:
        """Args: line: values for which ``is_json_value`` is true, and dicts of them."""
        with self._lock:
            self._waiting.append(line)  # encoding many lines at once is faster than one line between two steps
            if time.time() - self._written > FLUSH_SECONDS:
                self.write_out()
            elif self._timer is None:
                self._timer = _start(self._write_late)

    def write_out(self) -> None:
        """Write buffered lines. On an OSError they remain in the buffer, and the next call tries again."""
        with self._lock:
            self._stop_timer()
            if self._waiting:
                append_bytes(self._path, b"".join(map(_encoded, self._waiting)))
                self._waiting = []
            self._written = time.time()

    def _write_late(self) -> None:
        try:
            self.write_out()
        except OSError:
            pass  # the next line, or the exit, raises the same error in the main thread

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self) -> None:
        """Clear the buffer in a forked process, such as a loader's worker: the parent writes these lines."""
        self._waiting, self._timer, self._lock = [], None, threading.RLock()


def _encoded(line: dict[str, Any]) -> bytes:
    # An unpaired surrogate, as in file names, is valid in a Python str, and is written as a JSON escape.
    text = json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"
    return text.encode(errors="backslashreplace")


def _start(function: Any) -> threading.Timer | None:
    timer = threading.Timer(FLUSH_SECONDS, function)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # at the interpreter's exit, threads cannot be started
        return None
    return timer


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values. The name of a value in a nested dict becomes ``outer/inner``."""
    for name, value in values.items():
        value = plain(value)
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def is_json_value(value: Any) -> bool:
    """Whether ``metrics.jsonl`` stores the value. Other values, such as images, go to trackers only."""
    return isinstance(value, bool | int | float | str) or value is None


def warning_for(name: str, value: Any) -> str:
    """Warning for a value that is not written."""
    return (
        f"log(): {name!r} has type {type(value).__name__} and is not written, because metrics.jsonl stores only "
        "numbers, strings, booleans and None. Trackers accept more types (log_with=...). This warning is shown only "
        "once"
    )


def plain(value: Any) -> Any:
    """Convert a one-element tensor or array to a number; other values are unchanged."""
    if callable(getattr(value, "numel", None)):  # a torch tensor
        return value.item() if value.numel() == 1 else value
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:  # a numpy array or number
        return value.item()
    return value
