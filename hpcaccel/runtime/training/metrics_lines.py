"""Lines on their way to a metrics file, and the values in them. Without torch: a program need not have it."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import append_bytes

__all__ = ["Lines", "is_kept", "leaves", "left_out", "plain"]

FLUSH_SECONDS = 1.0


class Lines:
    """Keeps lines for up to a second, so that quick steps do not wait for the file system.

    Whoever follows the file decides by it whether a trial goes on: a line that no other one follows is written by a
    thread when its second is over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[bytes] = []
        self._written = 0.0
        self._timer: threading.Timer | None = None
        self._lock = threading.RLock()
        atexit.register(self.write_out)  # also of a program that dies of an exception: its last second tells why
        os.register_at_fork(after_in_child=self._forget)

    def add(self, line: dict[str, Any]) -> None:
        # Half a surrogate pair, as names of files may have, is a text to Python and an escape to JSON.
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")
        with self._lock:
            self._waiting.append(text + b"\n")
            if time.time() - self._written > FLUSH_SECONDS:
                self.write_out()
            elif self._timer is None:
                self._timer = _start(self._write_late)

    def write_out(self) -> None:
        """Write what waits. Where that fails it waits on, for whoever calls next to hear of it."""
        with self._lock:
            self._stop_timer()
            if self._waiting:
                append_bytes(self._path, b"".join(self._waiting))
                self._waiting = []
            self._written = time.time()

    def _write_late(self) -> None:
        try:
            self.write_out()
        except OSError:
            pass  # nobody would hear it in this thread: the next line, or the exit, meets the same disk

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _forget(self) -> None:
        """A forked process, say a loader's worker, has the lines of its parent, which writes them itself."""
        self._waiting, self._timer, self._lock = [], None, threading.RLock()


def _start(function: Any) -> threading.Timer | None:
    timer = threading.Timer(FLUSH_SECONDS, function)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # at the interpreter's exit, where threads cannot start any more
        return None
    return timer


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values, those of dicts within as ``outer/inner``."""
    for name, value in values.items():
        value = plain(value)
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def is_kept(value: Any) -> bool:
    """Whether a line of JSON can hold it; images and the like are for trackers."""
    return isinstance(value, bool | int | float | str) or value is None


def left_out(name: str, value: Any) -> str:
    """What is said of a value that is not kept."""
    return (
        f"log(): {name!r} is a {type(value).__name__}, and metrics.jsonl holds numbers and texts only; trackers "
        "take more (log_with=...). Left out, and no more said about such values"
    )


def plain(value: Any) -> Any:
    """A tensor or an array of one element as a number; everything else as it is."""
    if callable(getattr(value, "numel", None)):  # torch's
        return value.item() if value.numel() == 1 else value
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:  # numpy's
        return value.item()
    return value
