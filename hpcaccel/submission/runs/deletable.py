"""Rules for which parts of a run may be deleted. They apply to a plan, and again right before each deletion.

Pinned checkpoints, checkpoints from which another run is to start, and the newest intact checkpoint of each run are
kept. A whole run may be deleted only on request, and only if it is done or has no intact checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import is_pinned, manifest
from hpcaccel.core.durable_files import read_json
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import Damaged, HpcaccelError
from hpcaccel.submission.jobs.run_state import read_facts
from hpcaccel.submission.runs.find import all_runs
from hpcaccel.submission.runs.run_index import CachedOverview
from hpcaccel.submission.runs.status import RunStatus

__all__ = ["DONE", "TEMPORARY", "Item", "Origins", "deletable", "needed_by", "origins", "parts_of", "pinned_in"]

DONE = ("completed", "pruned")
TEMPORARY = ".clean-"
"""Prefix of the names to which files and folders are renamed before they are deleted."""
_PUT_ASIDE = tuple(f"{prefix}_step_" for prefix in checkpoint_files.PUT_ASIDE)
_FRESH_SECONDS = 1.0
"""The result of reading all runs is reused for this long, or for as long as the reading took if that is longer."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A file or folder that may be deleted."""

    path: Path
    kind: Literal["run", "checkpoint", "leftover", "unfinished"]
    run_id: str
    why: str
    bytes: int = 0


def deletable(run: RunDir, state: RunStatus, needed: Mapping[Path, str], *, whole_runs: bool) -> list[Item]:
    """The items of a run that may be deleted, without sizes."""
    places = [run.checkpoints, *(RunDir(path).checkpoints for path in parts_of(run))]
    if whole_runs and (why := _why_deletable(places, state)) is not None and needed_by(run.path, needed) is None:
        return [Item(path=run.path, kind="run", run_id=run.run_id, why=why)]
    found = [item for place in places for item in _of_checkpoints(place, run.run_id)]
    return [item for item in found if needed_by(item.path, needed) is None]


def _why_deletable(places: Sequence[Path], state: RunStatus) -> str | None:
    """Why a whole run may be deleted, or None if it may not."""
    paths = [path for place in places for _, path in checkpoint_files.step_directories(place)]
    if any(is_pinned(path) for path in paths):
        return None
    parts = state.tasks or (state,)
    if all(one.state in DONE for one in parts):
        return f"it is {state.state}"
    if any(_is_good(path) for path in paths):
        return None
    return f"its state is {state.state}, and it has no intact checkpoint"


def _of_checkpoints(place: Path, run_id: str) -> Iterator[Item]:
    """Leftovers and, if any checkpoint is intact, all checkpoints except pinned ones and the newest intact one."""
    found = checkpoint_files.step_directories(place)
    newest = next((path for _, path in found if _is_good(path)), None)
    if newest is not None:
        why = "it is damaged"  # and newer than the newest intact one
        for _, path in found:
            if path == newest:
                why = f"{newest.name} is newer"
            elif not is_pinned(path):
                yield Item(path=path, kind="checkpoint", run_id=run_id, why=why)
    for path in sorted(place.iterdir()) if place.is_dir() else []:
        if path.name.startswith(TEMPORARY) or checkpoint_files.attempt_of(path.name) is not None:
            yield Item(path=path, kind="leftover", run_id=run_id, why="left by an interrupted save or deletion")
        elif newest is not None and path.name.startswith(_PUT_ASIDE):
            yield Item(path=path, kind="leftover", run_id=run_id, why=f"it is {path.name.partition('_')[0]}")


def _is_good(path: Path) -> bool:
    try:
        manifest.read(path)
    except Damaged:
        return False
    return True


def pinned_in(path: Path) -> list[str]:
    """The checkpoints in ``path`` (a checkpoint, or a whole run) that are pinned."""
    places = [path / "checkpoints", *(RunDir(part).checkpoints for part in parts_of(RunDir(path)))]
    found = [path, *(one for place in places for _, one in checkpoint_files.step_directories(place))]
    return [one.name for one in found if is_pinned(one)]


def parts_of(run: RunDir) -> list[Path]:
    """The directories of an array's tasks or a sweep's trials."""
    folders = [run.path / name for name in ("tasks", "trials")]
    return [path for folder in folders if folder.is_dir() for path in sorted(folder.iterdir()) if path.name.isdecimal()]


def origins(cache: CachedOverview | None = None) -> dict[Path, str]:
    """The checkpoints from which unfinished runs are to start, each with the id of such a run.

    Such a checkpoint is not pinned if ``checkpoint.resume`` is a path that the user wrote, or if the user cannot write
    to the run that saved it.
    """
    found: dict[Path, str] = {}
    cache = CachedOverview("clean") if cache is None else cache
    for run in all_runs():
        if cache.recall(run.path) is not None:
            continue  # only runs that are done, and so do not start again, are cached
        for part in [run.dir, *map(RunDir, parts_of(run.dir))]:
            try:
                is_over = read_facts(part).settled is not None
                spec = (read_json(part.spec) or {}).get("spec", {})
            except (HpcaccelError, OSError):
                continue  # a damaged run does not start from any checkpoint
            resume = spec.get("checkpoint", {}).get("resume", "auto")
            if not is_over and resume not in ("auto", "never"):
                found[Path(resume).resolve()] = run.run_id
    return found


class Origins:
    """The result of ``origins``, cached for many deletions: reading all runs before each deletion could take hours.

    If a reading takes T, the result is at most 2 T or T + 1 s old, whichever is longer. The result can miss a run
    that was submitted in that time with a path in ``checkpoint.resume``; even a reading before each deletion would
    leave a gap of T. With ``--from`` there is no gap: this option pins the checkpoint, and pins are read at each
    deletion.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._found: Mapping[Path, str] = {}
        self._good_until = float("-inf")

    def __call__(self) -> Mapping[Path, str]:
        began = self._now()
        if began >= self._good_until:
            self._found = origins()
            read = self._now()
            self._good_until = read + max(_FRESH_SECONDS, read - began)
        return self._found


def needed_by(path: Path, needed: Mapping[Path, str]) -> str | None:
    """The id of a run that is to start from ``path``, from a checkpoint in it, or from a directory that contains it."""
    if not needed:
        return None
    real = path.resolve()
    return next(
        (who for place, who in needed.items() if place.is_relative_to(real) or real.is_relative_to(place)), None
    )
