"""Old runs and checkpoints: what may go, and deleting it.

Never touched: a run that something may still happen to, whatever is pinned, and the newest good checkpoint of each run
that is kept, from which an unfinished one goes on. A run is deleted as a whole only on request, and only when it is
done, or has no checkpoint to go on from.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hpcaccel import layout
from hpcaccel.errors import Damaged, HpcaccelError, RunDirectoryError
from hpcaccel.layout import sealed
from hpcaccel.layout.pins import is_pinned
from hpcaccel.rundir import RunDir, SweepDir
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.facts import read_record
from hpcaccel.submission.run import AnyRun
from hpcaccel.submission.status import RunStatus, statuses

__all__ = ["Cleaning", "Item", "delete", "plan_cleaning"]

_DONE = ("completed", "pruned")
_TEMPORARY = ".clean-"


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something that may be deleted."""

    path: Path
    kind: Literal["run", "checkpoint", "leftover"]
    run_id: str
    why: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Cleaning:
    """What may go, and which runs were left alone and why (their id and a sentence)."""

    items: tuple[Item, ...]
    kept: tuple[tuple[str, str], ...]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    def to_json(self) -> dict[str, Any]:
        items = [{**asdict(item), "path": str(item.path)} for item in self.items]
        kept = [{"run_id": run_id, "why": why} for run_id, why in self.kept]
        return {"items": items, "bytes": self.bytes, "kept": kept}


def plan_cleaning(
    runs: Sequence[AnyRun], *, older_than_seconds: float, whole_runs: bool = False, slurm: Slurm | None = None
) -> Cleaning:
    """Look at ``runs``; nothing is changed.

    Args:
        older_than_seconds: since the last sign of a run.
        whole_runs: the directories of runs that are done, not only their checkpoints but the newest.
    """
    now, items, kept = time.time(), list[Item](), list[tuple[str, str]]()
    for run, state in zip(runs, statuses([run.dir for run in runs], slurm), strict=True):
        if (why := _left_alone(run.dir, state, now - older_than_seconds)) is not None:
            kept.append((run.run_id, why))
            continue
        found = _of_run(run.dir, state, whole_runs=whole_runs)
        items += found
        if not found:
            kept.append((run.run_id, "nothing of it can go"))
    return Cleaning(items=tuple(items), kept=tuple(kept))


def _left_alone(run: RunDir, state: RunStatus, before: float) -> str | None:
    if not state.ended:
        return f"it is {state.state}"
    if run.lease.exists() and state.state == "lost":
        return "it ended without a word, and its lease is still there: `hpcaccel resume` or `cancel` it first"
    if (last := _last_sign(run)) > before:
        return f"its last sign is {max(0.0, (time.time() - last) / 86400):.1f} days old"
    return None


def _last_sign(run: RunDir) -> float:
    """When something was written to it last, in seconds since 1970."""
    places = [run.record, run.ledger, run.metrics, run.journal, run.checkpoints, *_parts(run)]
    times = [os.lstat(place).st_mtime for place in places if os.path.lexists(place)]
    return max([read_record(run).created, *times])


def _parts(run: RunDir) -> list[Path]:
    """The tasks of an array, the trials of a sweep: directories like that of a run."""
    folders = [run.path / name for name in ("tasks", "trials")]
    return [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir()) if path.name.isdecimal()]


def _of_run(run: RunDir, state: RunStatus, *, whole_runs: bool) -> list[Item]:
    places = [run.checkpoints, *(RunDir(path).checkpoints for path in _parts(run))]
    if whole_runs and (why := _may_go(places, state)) is not None:
        return [Item(path=run.path, kind="run", run_id=run.run_id, why=why, bytes=_size(run.path))]
    return [item for place in places for item in _of_checkpoints(place, run.run_id)]


def _may_go(places: Sequence[Path], state: RunStatus) -> str | None:
    """Why a whole run may be deleted; None where it may not."""
    paths = [path for place in places for _, path in layout.step_directories(place)]
    if any(is_pinned(path) for path in paths):
        return None
    parts = state.tasks or (state,)
    if all(one.state in _DONE for one in parts):
        return f"it is {state.state}"
    return None if any(_is_good(path) for path in paths) else f"it is {state.state}, without a checkpoint to go on from"


def _of_checkpoints(place: Path, run_id: str) -> Iterator[Item]:
    """All checkpoints but the newest good one, those that are pinned, and everything where none is good."""
    found = layout.step_directories(place)
    newest = next((path for _, path in found if _is_good(path)), None)
    if newest is not None:
        for _, path in found:
            if path != newest and not is_pinned(path):
                yield Item(
                    path=path, kind="checkpoint", run_id=run_id, why=f"{newest.name} is newer", bytes=_size(path)
                )
    for path in sorted(place.iterdir()) if place.is_dir() else []:
        if path.name.startswith(_TEMPORARY) or layout.attempt_of(path.name) is not None:
            yield Item(path=path, kind="leftover", run_id=run_id, why="it was never finished", bytes=_size(path))
        elif path.name.startswith(tuple(f"{word}_step_" for word in layout.PUT_ASIDE)) and newest is not None:
            yield Item(path=path, kind="leftover", run_id=run_id, why="it was put aside", bytes=_size(path))


def _is_good(path: Path) -> bool:
    try:
        sealed.read(path)
    except Damaged:
        return False
    return True


def _size(path: Path) -> int:
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)


def delete(item: Item, *, slurm: Slurm | None = None) -> None:
    """Delete it, unless its run has come back to life since it was looked at.

    It is renamed first, so that nobody ever finds half of it.

    Raises:
        RunDirectoryError: it may not be deleted any more, or cannot be.
    """
    run = _run_of(item)
    try:
        now = statuses([run], slurm)[0]
    except HpcaccelError as error:
        raise RunDirectoryError(f"{item.path} stays: {error}") from None
    if not now.ended:
        raise RunDirectoryError(f"{item.path} stays: its run is {now.state} again")
    if item.kind == "checkpoint" and is_pinned(item.path):
        raise RunDirectoryError(f"{item.path} stays: it has been pinned meanwhile")
    aside = item.path.with_name(f"{_TEMPORARY}{item.path.name.lstrip('.')}-{secrets.token_hex(2)}")
    try:
        os.rename(item.path, aside)
        shutil.rmtree(aside)
    except FileNotFoundError:
        return  # somebody else was quicker
    except OSError as error:
        raise RunDirectoryError(f"{item.path} cannot be deleted: {error.strerror}") from None


def _run_of(item: Item) -> RunDir:
    if item.kind == "run":
        path = item.path
    else:
        path = item.path.parent.parent  # <run>/checkpoints/<item>
        path = path.parent.parent if path.parent.name in ("tasks", "trials") else path
    return SweepDir(path) if read_record(RunDir(path)).kind == "sweep" else RunDir(path)
