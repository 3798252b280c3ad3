"""The other side: results that another machine fetches. First a list, then the files that it lacks."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import CheckpointError, UserError
from hpcaccel.submission.find import find_run
from hpcaccel.submission.remote.best_checkpoint import best_of
from hpcaccel.submission.remote.protocol import FrameWriter
from hpcaccel.submission.run_state import read_record

__all__ = ["serve"]

CHUNK_BYTES = 1 << 20
_NOT_RESULTS = {"code", "node.pyz", "submitit", "control", "lease.json", "checkpoints"}
"""What a run needs, and what it made but is too large to come along without being asked for."""


def serve(request: dict[str, Any], frames: FrameWriter) -> None:
    """Answer ``{"run", "checkpoint"}`` with the list of files, and with ``files`` by their contents.

    Raises:
        RunNotFound, CheckpointError: what is asked for is not here.
    """
    run = find_run(request["run"]).dir
    if "files" in request:
        for name, offset, size in request["files"]:
            _send(_inside(run, name), name, int(offset), int(size), frames)
        return
    chosen = None if request["checkpoint"] is None else _checkpoint(run, request["checkpoint"], request)
    record = read_record(run)
    frames.send("run", run_id=run.run_id, name=record.name, checkpoint=None if chosen is None else chosen.name)
    for path in _results(run.path, chosen):
        known = path.lstat()
        target = os.readlink(path) if path.is_symlink() else None
        name = path.relative_to(run.path).as_posix()
        frames.send("file", name=name, size=known.st_size, mtime_ns=known.st_mtime_ns, link=target)


def _results(folder: Path, checkpoint: Path | None) -> Iterator[Path]:
    yield from _below(folder, leave_out=_NOT_RESULTS)
    if checkpoint is not None:
        yield from _below(checkpoint, leave_out=set())


def _below(folder: Path, *, leave_out: set[str]) -> Iterator[Path]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        if entry.name in leave_out or entry.name.endswith(".tmp"):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _below(path, leave_out=leave_out)
        elif entry.is_file(follow_symlinks=False) or (
            entry.is_symlink() and not os.path.isabs(os.readlink(path)) and entry.is_file()
        ):
            yield path


def _checkpoint(run: RunDir, which: str, request: dict[str, Any]) -> Path:
    """``best``, ``last``, or the checkpoint of a step."""
    found = checkpoint_files.step_directories(run.checkpoints)
    committed = [(step, path) for step, path in found if (path / checkpoint_files.MANIFEST).exists()]
    steps = ", ".join(str(step) for step, _ in sorted(committed)) or "none"
    if which in ("last", "latest") and committed:
        return max(committed)[1]
    if which == "best" and committed:
        return best_of(run, committed, metric=request.get("metric"), largest=bool(request.get("largest")))
    for step, path in committed:
        if which == str(step):
            return path
    raise CheckpointError(
        f"{run.run_id} has no checkpoint {which!r} (steps: {steps}). Wanted is a step, 'best' or 'last'"
    )


def _inside(run: RunDir, name: str) -> Path:
    path = run.path / name
    if ".." in Path(name).parts or Path(name).is_absolute():
        raise UserError(f"{name!r} is no file of {run.run_id}")
    return path


def _send(path: Path, name: str, offset: int, size: int, frames: FrameWriter) -> None:
    """``size`` bytes of a file from ``offset``; the last frame has the CRC-32 of all of them, those before included."""
    crc = 0
    with path.open("rb") as file:
        position = 0
        while position < size:
            piece = file.read(min(CHUNK_BYTES, (offset if position < offset else size) - position))
            if not piece:
                break  # it was cut short meanwhile; the sum tells
            crc = zlib.crc32(piece, crc)
            position += len(piece)
            if position > offset:
                frames.send("data", piece, name=name)
    frames.send("end", name=name, crc=crc, size=position)
