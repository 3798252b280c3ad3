"""Checkpoints that a program writes itself (``checkpoint.watch``), and the newest checkpoint of any kind.

A program may be killed while it saves, so only complete checkpoints count. How a complete checkpoint is recognised
depends on the trainer, and is described by ``LaunchWatch``. The newest checkpoint is the one that was completed last,
not the one with the highest step: a directory may contain later steps of an abandoned branch.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcaccel import checkpoint_files
from hpcaccel.core.durable_files import read_json
from hpcaccel.core.launch_spec import LaunchWatch, find_launch
from hpcaccel.core.records import AttemptEnd
from hpcaccel.core.run_dir import RUN_DIR, RunDir
from hpcaccel.errors import RunDirectoryError

__all__ = ["SavedCheckpoint", "WatchedCheckpoint", "is_whole", "newest_saved", "watched"]

_ARCHIVE_BEGINS = b"PK\x03\x04"


@dataclass(frozen=True, kw_only=True)
class WatchedCheckpoint:
    """A checkpoint that the program has written. ``time`` is when it was completed (seconds since the epoch)."""

    path: Path
    step: int | None
    """None if the path contains no step."""
    complete: bool
    time: float


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A run's newest checkpoint. ``name`` is the name of a directory in the run's ``checkpoints/`` for a checkpoint of
    hpcaccel, and a path or URL for one that the program has written itself."""

    name: str
    step: int | None
    path: Path | None
    """None for a URL."""
    time: float | None = None
    """When a watched checkpoint was completed (seconds since the epoch)."""


def watched(run: RunDir) -> list[WatchedCheckpoint]:
    """The checkpoints that match the run's ``checkpoint.watch``, in the order in which they were completed; incomplete
    ones first."""
    try:
        launch = find_launch(run)
    except RunDirectoryError:  # a damaged spec.json: other readers of the file report it
        return []
    if launch is None or launch.watch is None:
        return []
    watch = launch.watch
    pattern = watch.glob.replace(RUN_DIR, glob.escape(str(run.path)))
    paths = [Path(path) for path in glob.iglob(pattern, recursive=True)]
    last: dict[Path, int] = {}
    for path in paths:
        last[path.parent] = max(last.get(path.parent, 0), _step(path, watch) or 0)
    found = [one for path in paths if (one := _look(path, watch, last=last[path.parent])) is not None]
    return sorted(found, key=lambda one: (one.complete, one.time, one.step or 0))


def newest_saved(run: RunDir, ends: Sequence[AttemptEnd] = ()) -> SavedCheckpoint | None:
    """The newest complete checkpoint of ``run``; None if there is none.

    Watched checkpoints take precedence. If there are none, the newest of hpcaccel's own checkpoints is compared with
    the last one that the program named when it stopped; the checkpoint with the higher step is returned.

    Args:
        ends: the ledger's end lines.
    """
    created = float((read_json(run.record) or {}).get("created", 0.0))
    complete = [one for one in watched(run) if one.complete and one.time >= created]
    if complete:
        last = complete[-1]
        return SavedCheckpoint(name=str(last.path), step=last.step, path=last.path, time=last.time)
    own = checkpoint_files.newest(run.checkpoints)
    named = next((line for line in reversed(ends) if _is_named(line)), None)
    if named is not None and (own is None or own.step < (named.checkpoint_step or 0)):
        name = str(named.checkpoint)
        return SavedCheckpoint(name=name, step=named.checkpoint_step, path=None if "://" in name else Path(name))
    return None if own is None else SavedCheckpoint(name=own.name, step=own.step, path=own.path)


def _is_named(line: AttemptEnd) -> bool:
    """Whether ``line`` names a checkpoint that the program has written itself, and that still exists or is a URL."""
    name = line.checkpoint
    if name is None or checkpoint_files.step_of(name) is not None:
        return False
    return "://" in name or os.path.exists(name)


def _step(path: Path, watch: LaunchWatch) -> int | None:
    match = re.search(watch.step, str(path) if "/" in watch.step else path.name)
    return int(match[1]) if match and match[1] and match[1].isdecimal() else None


def _look(path: Path, watch: LaunchWatch, *, last: int) -> WatchedCheckpoint | None:
    """The checkpoint at ``path``; None if it has been deleted in the meantime, or is neither file nor directory.

    Args:
        last: the highest step of the checkpoints in the same folder, complete or not.
    """
    step = _step(path, watch)
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return WatchedCheckpoint(path=path, step=step, complete=is_whole(path), time=path.stat().st_mtime)
        if not stat.S_ISDIR(mode):
            return None
        mark = _mark(path, watch.complete, step, last=last)
        time = (path if mark is None else mark).stat().st_mtime
    except (OSError, ValueError, NotImplementedError):  # the last two: an unusable pattern in ``complete``
        return None
    return WatchedCheckpoint(path=path, step=step, complete=mark is not None, time=time)


def _mark(path: Path, complete: str | None, step: int | None, *, last: int) -> Path | None:
    """The path whose modification time is when the checkpoint directory ``path`` was completed; None if the
    checkpoint is incomplete. ``complete`` is a pattern for a file in a complete directory or, if it begins with
    ``../``, the name of a file outside that contains the last complete step.

    Raises:
        OSError: the file cannot be read.
    """
    if complete is None:
        return None
    if not complete.startswith("../"):
        return next(iter(sorted(path.glob(complete))), None)
    try:
        text = (path / complete).read_text(errors="replace")
    except FileNotFoundError:
        return None
    numbers = re.findall(r"\d+", text)
    if not text.strip():
        # It is being rewritten, or its writer was killed. The last save may be incomplete; those before it are not.
        numbers = [str(last - 1)] if last else []
    # This file is rewritten after each checkpoint: its time does not show when an earlier checkpoint was completed.
    return path if numbers and step is not None and step <= int(numbers[-1]) else None


def is_whole(path: Path) -> bool:
    """Whether a file is not empty and, if it begins like a ZIP archive (``torch.save``), also has the archive's end.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        begin = file.read(len(_ARCHIVE_BEGINS))
    return bool(begin) and (begin != _ARCHIVE_BEGINS or zipfile.is_zipfile(path))
