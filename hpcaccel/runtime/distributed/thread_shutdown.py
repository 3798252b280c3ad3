"""Letting the process group's threads come to rest before the interpreter goes away.

A thread of gloo that has finished a collective gives its tensors back, for which it needs Python's lock. When the
interpreter is being finalised at that moment, Python ends the thread in the middle of C++ code, and the process dies of
SIGABRT instead of leaving with its exit code (one run in twenty on a busy machine).
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

__all__ = ["settle"]

TIMEOUT_SECONDS = 2.0
LOOK_SECONDS = 0.001
QUIET_LOOKS = 5
"""So often in a row nobody must have anything to do."""


def settle() -> None:
    """Sleep, which lends Python's lock to whoever waits for it, until all other threads of this process sleep too."""
    give_up = time.monotonic() + TIMEOUT_SECONDS
    quiet = 0
    while quiet < QUIET_LOOKS and time.monotonic() < give_up:
        time.sleep(LOOK_SECONDS)
        quiet = 0 if _others_run() else quiet + 1


def _others_run() -> bool:
    own = str(threading.get_native_id())
    for task in Path("/proc/self/task").iterdir():
        if task.name == own:
            continue
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended in between
        if state not in "SZX":
            return True
    return False
