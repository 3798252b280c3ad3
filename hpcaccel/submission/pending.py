"""What was asked for and has not been answered yet: whoever asks for the same again goes on with it."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import read_json, state_home, write_json
from hpcaccel.submission.locks import UNLOCKED, forget_old, give_back, take_if_free, tell_of_no_state

__all__ = ["Pending", "pending"]

LEFT_SECONDS = 7 * 86_400.0
"""After so long the files of a call that was never repeated are deleted."""


@dataclass
class Pending:
    """Something asked for, and not answered yet. ``done`` once its answer is here, whatever that was."""

    key: str
    is_repeated: bool
    """An earlier call with the same contents was cut off: it may have come through."""
    done: bool = False


@contextmanager
def pending(kind: str, contents: Mapping[str, Any], *, kept_seconds: float | None) -> Iterator[Pending]:
    """A key for something that is asked for, on disk before the block begins, and kept when the block does not say that
    it is done: who asks for the same then gets the same key. Two calls at the same time are two: the file is locked by
    the one that uses it. Where there are no locks, or nothing can be written, each call is a new one.

    Args:
        kind: the folder, in the user's state folder.
        contents: what makes two calls the same.
        kept_seconds: after so long it is a new one; None: never.
    """
    text = json.dumps(contents, sort_keys=True)
    folder = state_home() / "hpcaccel" / kind
    if kept_seconds is not None:
        forget_old(folder, older_than_seconds=max(kept_seconds, LEFT_SECONDS))
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    path, lock = _free(folder, name)
    if lock == UNLOCKED:
        yield Pending(uuid.uuid4().hex, is_repeated=False)
        return
    try:
        before = read_json(path)
        if before is not None and kept_seconds is not None and time.time() - path.stat().st_mtime > kept_seconds:
            before = None
        asked = Pending(uuid.uuid4().hex if before is None else str(before["key"]), before is not None)
        if before is None:
            try:
                write_json(path, {"key": asked.key}, mode=0o600)
            except OSError as error:
                tell_of_no_state(error, folder)
        try:
            yield asked
        finally:
            if asked.done:
                path.unlink(missing_ok=True)
    finally:
        give_back(path.with_suffix(".lock"), lock, remove=not path.exists())


def _free(folder: Path, name: str) -> tuple[Path, int]:
    """The first of ``name-0``, ``name-1`` … that no living process works on, and the lock on it: one that a process
    has left before any other."""
    for path in sorted(folder.glob(f"{name}-*.json")):
        if (lock := take_if_free(path.with_suffix(".lock"))) is not None:
            if lock == UNLOCKED or path.exists():
                return path, lock
            give_back(path.with_suffix(".lock"), lock, remove=True)
    for number in range(1000):
        path = folder / f"{name}-{number}.json"
        if (lock := take_if_free(path.with_suffix(".lock"))) is not None:
            return path, lock
    raise AssertionError(f"a thousand submissions at a time in {folder}")
