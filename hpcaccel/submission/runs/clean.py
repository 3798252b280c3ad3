"""Cleaning of old runs and checkpoints: a plan, and the deletion of its items.

Runs that may still change are never touched. ``deletable`` has the rules for all other runs; the rules are checked
again right before each deletion.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import HpcaccelError, RunDirectoryError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec.cluster.cluster_facts import format_age
from hpcaccel.submission.jobs.job_submission import JobSubmission, SubmitUnderway, made_in
from hpcaccel.submission.jobs.run_state import read_facts, read_record
from hpcaccel.submission.runs.deletable import (
    DONE,
    TEMPORARY,
    Item,
    Origins,
    deletable,
    needed_by,
    origins,
    parts_of,
    pinned_in,
)
from hpcaccel.submission.runs.run_handle import AnyRun
from hpcaccel.submission.runs.run_index import CachedOverview, look_at
from hpcaccel.submission.runs.status import RunStatus, statuses

__all__ = ["Cleaning", "Item", "Origins", "delete", "plan_cleaning"]


def unfinished(folders: Iterable[Path], *, before: float) -> list[Item]:
    """Temporary directories of submits that were killed before they submitted anything.

    Args:
        folders: runs directories, with a folder per run name; duplicates are ignored.
        before: only directories that were last written before this time, in seconds since 1970.
    """
    found = []
    for place in sorted({path for folder in set(folders) for path in folder.glob("[!.]*/.[0-9]*.tmp")}):
        if (run := made_in(place)) is not None and _is_leftover(place, run, before):
            why = "the submit command that was creating it was killed"
            found.append(Item(path=place, kind="unfinished", run_id=run.run_id, why=why, bytes=_size(place)))
    return found


def _is_leftover(place: Path, run: RunDir, before: float) -> bool:
    try:
        with JobSubmission(run, wait=False) as submission:
            known = os.lstat(place)
            return submission.is_locked and known.st_uid == os.geteuid() and known.st_mtime <= before
    except (SubmitUnderway, FileNotFoundError):
        return False


@dataclass(frozen=True, kw_only=True)
class Cleaning:
    """The items to delete, and the runs that are kept, as pairs of run id and reason."""

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
    runs: Sequence[AnyRun],
    *,
    older_than_seconds: float,
    whole_runs: bool = False,
    slurm: Slurm | None = None,
    folders: Sequence[Path] = (),
) -> Cleaning:
    """Plan the cleaning of ``runs``; nothing is changed.

    Args:
        folders: runs directories, in which killed submits may have left temporary directories.
        older_than_seconds: minimum age of the last write to a run.
        whole_runs: whether to delete whole runs that are done or have no intact checkpoint, not only old checkpoints.
    """
    before = time.time() - older_than_seconds
    items, kept = unfinished(folders, before=before), list[tuple[str, str]]()
    cache = CachedOverview("clean")
    needed = origins(cache)
    cached = {run.path: over for run in runs if (over := _CleaningFacts.recalled(cache, run.dir)) is not None}
    others = [run for run in runs if run.path not in cached]
    looks = {run.path: look_at(run.dir) for run in others}
    states = dict(zip((run.path for run in others), statuses([run.dir for run in others], slurm), strict=True))
    for run in runs:
        over = cached.get(run.path)
        if over is None:
            over = _CleaningFacts.read(run.dir, states[run.path])
            if over.is_done:
                cache.keep(looks[run.path], asdict(over))
        if (why := _why_kept(run.dir, over, before)) is not None:
            kept.append((run.run_id, why))
            continue
        found = _found(run.dir, over, states.get(run.path), needed, whole_runs=whole_runs)
        items += found
        if not found:
            kept.append((run.run_id, "nothing in it may be deleted"))
    cache.write()
    return Cleaning(items=tuple(items), kept=tuple(kept))


@dataclass(frozen=True, kw_only=True)
class _CleaningFacts:
    """The facts about a run that the plan needs.

    For a run that is done, these facts are cached (see ``run_index``). :func:`delete` does not use the cache: it reads
    everything again.
    """

    state: str
    ended: bool
    is_done: bool
    """Whether the ledger shows the run as completed or pruned, and the run is neither an array nor a sweep."""
    sign: float
    """Time of the last write to the run, in seconds since 1970."""
    pinned: bool
    bytes: int | None

    @classmethod
    def recalled(cls, cache: CachedOverview, run: RunDir) -> _CleaningFacts | None:
        value = cache.recall(run.path)
        names = {item.name for item in fields(cls)}
        return cls(**value) if value is not None and value.keys() == names else None

    @classmethod
    def read(cls, run: RunDir, state: RunStatus) -> _CleaningFacts:
        is_done = state.state in DONE and not state.tasks and read_record(run).kind == "run"
        return cls(
            state=state.state,
            ended=state.ended,
            is_done=is_done and read_facts(run).settled is not None,
            sign=_last_write(run),
            pinned=bool(pinned_in(run.path)) if is_done else False,
            bytes=_size(run.path) if is_done else None,
        )


def _found(
    run: RunDir, over: _CleaningFacts, state: RunStatus | None, needed: Mapping[Path, str], *, whole_runs: bool
) -> list[Item]:
    """The items of a run that may be deleted, with sizes."""
    if (
        whole_runs
        and over.is_done
        and not over.pinned
        and over.bytes is not None
        and needed_by(run.path, needed) is None
    ):
        return [Item(path=run.path, kind="run", run_id=run.run_id, why=f"it is {over.state}", bytes=over.bytes)]
    state = state or statuses([run])[0]
    found = deletable(run, state, needed, whole_runs=whole_runs)
    return [replace(item, bytes=_size(item.path)) for item in found]


def _why_kept(run: RunDir, over: _CleaningFacts, before: float) -> str | None:
    if not over.ended:
        return f"it is {over.state}"
    if over.state == "lost" and run.lease.exists():
        return f"it is lost, and its lease still exists: run `hpcaccel resume {run.run_id}` first"
    if over.sign > before:
        return f"it was last written to {format_age(max(0.0, time.time() - over.sign))} ago"
    return None


def _last_write(run: RunDir) -> float:
    """Time of the last write to the run, in seconds since 1970."""
    places = [run.record, run.ledger, run.metrics, run.journal, run.checkpoints, *parts_of(run)]
    times = [os.lstat(place).st_mtime for place in places if os.path.lexists(place)]
    return max([read_record(run).created, *times])


def _size(path: Path) -> int:
    """Bytes that the deletion of ``path`` frees: without files that have another name elsewhere, as a file that several
    checkpoints share may have."""
    found, waiting = 0, [os.fspath(path)]
    names: Counter[tuple[int, int]] = Counter()
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                        continue
                    facts = entry.stat(follow_symlinks=False)
                    names[facts.st_dev, facts.st_ino] += 1
                    if names[facts.st_dev, facts.st_ino] == facts.st_nlink:
                        found += facts.st_size
        except OSError:
            continue  # another process is deleting it, or it cannot be read
    return found


def delete(item: Item, *, slurm: Slurm | None = None, origins: Origins | None = None) -> None:
    """Delete an item, unless its run was resumed after the plan, or another run needs the item now.

    The item is renamed first, so that a partial deletion is never visible. The item is renamed back if, in the
    meantime, it was pinned or its run was resumed. An ``unfinished`` item is deleted without these steps.

    Args:
        origins: the checkpoints that other runs need, shared by several deletions; if None, they are read again.

    Raises:
        RunDirectoryError: the item may no longer be deleted, or the deletion failed.
    """
    if item.kind == "unfinished":
        _remove(item.path, of=item.path)
        return
    run = _run_of(item)
    try:
        before = run.record.read_bytes()
        now = statuses([run], slurm)[0]
        needed = (origins or Origins())()
    except FileNotFoundError:
        return  # another process deleted it
    except HpcaccelError as error:
        raise RunDirectoryError(f"{item.path} was not deleted: {error}") from None
    if not now.ended:
        raise RunDirectoryError(f"{item.path} was not deleted: its run is {now.state} again")
    _refuse_what_is_kept(item, run, now, needed)
    aside = item.path.with_name(f"{TEMPORARY}{item.path.name.lstrip('.')}-{secrets.token_hex(2)}")
    try:
        os.rename(item.path, aside)
        record = (aside / run.record.name) if item.kind == "run" else run.record
        if pinned_in(aside) or record.read_bytes() != before:
            os.rename(aside, item.path)
            raise RunDirectoryError(
                f"{item.path} was not deleted: it was pinned or its run was resumed in the meantime"
            )
    except FileNotFoundError:
        return  # another process deleted it
    except OSError as error:
        raise _cannot_delete(item.path, error) from None
    _remove(aside, of=item.path)


def _remove(path: Path, *, of: Path) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return  # another process deleted it
    except OSError as error:
        raise _cannot_delete(of, error) from None


def _cannot_delete(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(f"{path} cannot be deleted: {error.strerror}")


def _refuse_what_is_kept(item: Item, run: RunDir, now: RunStatus, needed: Mapping[Path, str]) -> None:
    """Raises RunDirectoryError for an item that may no longer be deleted."""
    if pinned := pinned_in(item.path):
        raise RunDirectoryError(f"{item.path} was not deleted: {pinned[0]} has since been pinned")
    if (who := needed_by(item.path, needed)) is not None:
        raise RunDirectoryError(f"{item.path} was not deleted: run {who} will start from it")
    found = deletable(run, now, needed, whole_runs=item.kind == "run")
    if os.path.lexists(item.path) and item.path not in [one.path for one in found]:
        raise RunDirectoryError(f"{item.path} was not deleted: its run has changed since the plan was made")


def _run_of(item: Item) -> RunDir:
    if item.kind == "run":
        path = item.path
    else:
        path = item.path.parent.parent  # <run>/checkpoints/<item>
        path = path.parent.parent if path.parent.name in ("tasks", "trials") else path
    return SweepDir(path) if read_record(RunDir(path)).kind == "sweep" else RunDir(path)
