"""What the last run of a name has measured: how large its checkpoints are, and how long a save and a step take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcaccel import checkpoint_files as layout
from hpcaccel.core.records import Timing, from_dict
from hpcaccel.core.run_dir import RunDir, index_lines, read_json, read_lines
from hpcaccel.errors import HpcaccelError

__all__ = ["History", "last_run_of", "read_history"]

LOOKED_AT = 10
"""So many of the newest runs of a name; one of them has saved, or none is taken to have."""


@dataclass(frozen=True, kw_only=True)
class History:
    """Figures of one run; None for what it has not measured. Seconds and bytes."""

    run_id: str
    checkpoint_bytes: int | None = None
    """Of the newest checkpoint."""
    checkpoint_files: int | None = None
    """Files and directories of it."""
    save_seconds: float | None = None
    """Of the slowest save of the newest attempt that saved, until it was committed."""
    step_seconds: float | None = None
    """Median."""
    slowest_step_seconds: float | None = None


def last_run_of(name: str, runs_dir: Path) -> Iterator[RunDir]:
    """The runs of this name, newest first: those of ``runs_dir`` and of the user's index."""
    indexed = [Path(line["path"]) for line in index_lines() if line.get("name") == name and "path" in line]
    here = [record.parent for record in (runs_dir / name).glob("[!.]*/record.json")]
    paths = {path.resolve(): path for path in [*indexed, *here]}
    for path in sorted(paths.values(), key=lambda path: path.name, reverse=True):
        if (run := RunDir(path)).record.exists():
            yield run


def read_history(name: str, runs_dir: Path) -> History | None:
    """Figures of the newest run of this name that has a checkpoint; None where there is none."""
    for _, run in zip(range(LOOKED_AT), last_run_of(name, runs_dir), strict=False):
        parts = [run, *(RunDir(path) for path in _parts(run))]
        found = next((history for part in parts if (history := _of(part)) is not None), None)
        if found is not None:
            return found
    return None


def _parts(run: RunDir) -> Iterator[Path]:
    """The first tasks of an array, the first trials of a sweep."""
    for folder in ("tasks", "trials"):
        yield from sorted((run.path / folder).glob("[0-9]*"))[:LOOKED_AT]


def _of(run: RunDir) -> History | None:
    newest = layout.newest(run.checkpoints)
    attempts = _attempts(run)
    saved, save_seconds = _saves(run, attempts)
    manifest = {} if newest is None else newest.manifest
    size = manifest.get("bytes", saved)
    if size is None:
        return None
    timing = _timing(run, attempts) or Timing()
    return History(
        run_id=run.run_id,
        checkpoint_bytes=int(size),
        checkpoint_files=None if newest is None else 1 + sum(1 for _ in newest.path.rglob("*")),
        save_seconds=save_seconds if save_seconds is not None else timing.slowest_save_seconds,
        step_seconds=timing.step_seconds,
        slowest_step_seconds=timing.slowest_step_seconds,
    )


def _attempts(run: RunDir) -> list[int]:
    try:
        return sorted((int(path.name) for path in run.attempts.iterdir() if path.name.isdecimal()), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _saves(run: RunDir, attempts: Sequence[int]) -> tuple[int | None, float | None]:
    """Bytes of the last save and seconds of the slowest one, of the newest attempt that has saved."""
    for attempt in attempts:
        lines = [line for line, _ in read_lines(run.saves(attempt)) if "bytes" in line and "seconds" in line]
        if lines:
            return int(lines[-1]["bytes"]), max(float(line["seconds"]) for line in lines)
    return None, None


def _timing(run: RunDir, attempts: Sequence[int]) -> Timing | None:
    for attempt in attempts:
        try:
            value = read_json(run.timing(attempt))
        except (OSError, HpcaccelError):
            continue  # damaged: an older attempt, or nothing, is known
        if value is not None:
            return from_dict(Timing, value)
    return None
