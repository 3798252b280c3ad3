"""Old runs and checkpoints: what may go, and deleting it.

Never touched: a run that something may still happen to, whatever is pinned or another run is to begin from, and the
newest good checkpoint of each run that is kept, from which an unfinished one goes on. A run is deleted as a whole only
on request, and only when it is done, or has no checkpoint to go on from. All of it is looked at once more right before
each deletion.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import manifest
from hpcaccel.checkpoint_files.pins import is_pinned
from hpcaccel.core.run_dir import RunDir, SweepDir, read_json
from hpcaccel.errors import Damaged, HpcaccelError, RunDirectoryError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec.site import age_in_words
from hpcaccel.submission.build import made_in
from hpcaccel.submission.find import all_runs
from hpcaccel.submission.idempotent_resume import Turn, Underway
from hpcaccel.submission.run_handle import AnyRun
from hpcaccel.submission.run_index import Remembered, look_at
from hpcaccel.submission.run_state import read_facts, read_record
from hpcaccel.submission.status import RunStatus, statuses

__all__ = ["Cleaning", "Item", "Origins", "delete", "plan_cleaning"]

_DONE = ("completed", "pruned")
_TEMPORARY = ".clean-"
_FRESH_SECONDS = 1.0
"""For so long, or as long as it took where that is longer, one reading of all runs serves."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something that may be deleted."""

    path: Path
    kind: Literal["run", "checkpoint", "leftover", "unfinished"]
    run_id: str
    why: str
    bytes: int = 0


def unfinished(folders: Iterable[Path], *, before: float) -> list[Item]:
    """Directories of submits that were killed while they made them: nothing of them was ever handed in.

    Args:
        folders: of runs, each of which holds a folder for each name; one may be given often.
        before: only what was written last before then, in seconds since 1970.
    """
    found = []
    for place in sorted({path for folder in set(folders) for path in folder.glob("[!.]*/.[0-9]*.tmp")}):
        if (run := made_in(place)) is not None and _is_left(place, run, before):
            why = "its submit was killed while it was made"
            found.append(Item(path=place, kind="unfinished", run_id=run.run_id, why=why, bytes=_size(place)))
    return found


def _is_left(place: Path, run: RunDir, before: float) -> bool:
    try:
        with Turn(run, wait=False) as turn:
            known = os.lstat(place)
            return turn.is_locked and known.st_uid == os.geteuid() and known.st_mtime <= before
    except (Underway, FileNotFoundError):
        return False


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
    runs: Sequence[AnyRun],
    *,
    older_than_seconds: float,
    whole_runs: bool = False,
    slurm: Slurm | None = None,
    folders: Sequence[Path] = (),
) -> Cleaning:
    """Look at ``runs``; nothing is changed.

    Args:
        folders: of runs, in which killed submits may have left something.
        older_than_seconds: since the last sign of a run.
        whole_runs: the directories of runs that are done, not only their checkpoints but the newest.
    """
    before = time.time() - older_than_seconds
    items, kept = unfinished(folders, before=before), list[tuple[str, str]]()
    remembered = Remembered("clean")
    needed = _origins(remembered)
    told = {run.path: over for run in runs if (over := _Over.recalled(remembered, run.dir)) is not None}
    others = [run for run in runs if run.path not in told]
    looks = {run.path: look_at(run.dir) for run in others}
    states = dict(zip((run.path for run in others), statuses([run.dir for run in others], slurm), strict=True))
    for run in runs:
        over = told.get(run.path)
        if over is None:
            over = _Over.read(run.dir, states[run.path])
            if over.is_done:
                remembered.keep(looks[run.path], asdict(over))
        if (why := _left_alone(run.dir, over, before)) is not None:
            kept.append((run.run_id, why))
            continue
        found = _found(run.dir, over, states.get(run.path), needed, whole_runs=whole_runs)
        items += found
        if not found:
            kept.append((run.run_id, "nothing of it can go"))
    remembered.write()
    return Cleaning(items=tuple(items), kept=tuple(kept))


@dataclass(frozen=True, kw_only=True)
class _Over:
    """What is looked at of each run. Of one that is done it stays so, and is remembered: see ``run_index``. Nothing is
    deleted by it: :func:`delete` reads everything once more."""

    state: str
    ended: bool
    is_done: bool
    """Whether it is completed or pruned, by its ledger, and has no parts that are runs of their own."""
    sign: float
    """When something was written to it last, in seconds since 1970."""
    pinned: bool
    bytes: int | None

    @classmethod
    def recalled(cls, remembered: Remembered, run: RunDir) -> _Over | None:
        value = remembered.recall(run.path)
        names = {item.name for item in fields(cls)}
        return cls(**value) if value is not None and value.keys() == names else None

    @classmethod
    def read(cls, run: RunDir, state: RunStatus) -> _Over:
        is_done = state.state in _DONE and not state.tasks and read_record(run).kind == "run"
        return cls(
            state=state.state,
            ended=state.ended,
            is_done=is_done and read_facts(run).settled is not None,
            sign=_last_sign(run),
            pinned=bool(_pins(run.path)) if is_done else False,
            bytes=_size(run.path) if is_done else None,
        )


def _found(
    run: RunDir, over: _Over, state: RunStatus | None, needed: Mapping[Path, str], *, whole_runs: bool
) -> list[Item]:
    """What may go of a run, with sizes."""
    if whole_runs and over.is_done and not over.pinned and over.bytes is not None and _needed(run.path, needed) is None:
        return [Item(path=run.path, kind="run", run_id=run.run_id, why=f"it is {over.state}", bytes=over.bytes)]
    state = state or statuses([run])[0]
    found = _of_run(run, state, needed, whole_runs=whole_runs)
    return [replace(item, bytes=_size(item.path)) for item in found]


def _left_alone(run: RunDir, over: _Over, before: float) -> str | None:
    if not over.ended:
        return f"it is {over.state}"
    if over.state == "lost" and run.lease.exists():
        return "it ended without a word, and its lease is still there: `hpcaccel resume` or `cancel` it first"
    if over.sign > before:
        return f"its last sign is {age_in_words(max(0.0, time.time() - over.sign))} old"
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


def _origins(remembered: Remembered | None = None) -> dict[Path, str]:
    """What runs that are not over were told to begin from, and the id of one that was: without a pin, where its user
    wrote a path into ``checkpoint.resume``, or may not write to the other run."""
    found: dict[Path, str] = {}
    remembered = Remembered("clean") if remembered is None else remembered
    for run in all_runs():
        if remembered.recall(run.path) is not None:
            continue  # it is done, and begins nothing
        for part in [run.dir, *map(RunDir, _parts(run.dir))]:
            try:
                is_over = read_facts(part).settled is not None
                spec = (read_json(part.spec) or {}).get("spec", {})
            except (HpcaccelError, OSError):
                continue  # a damaged directory begins nothing
            resume = spec.get("checkpoint", {}).get("resume", "auto")
            if not is_over and resume not in ("auto", "never"):
                found[Path(resume).resolve()] = run.run_id
    return found


class Origins:
    """What runs are to begin from, for many deletions: to read all runs before each of them would take hours.

    What is missed is a run that was submitted, with a path in ``checkpoint.resume``, after the newest reading had gone
    by its place, and begins from what is deleted now. That reading began at most twice the time ago that one takes, or
    that time and a second; even one reading for each deletion would leave the time that it takes. ``--from`` pins what
    it names, and pins are looked at in the moment of each deletion.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._found: Mapping[Path, str] = {}
        self._good_until = float("-inf")

    def __call__(self) -> Mapping[Path, str]:
        began = self._now()
        if began >= self._good_until:
            self._found = _origins()
            read = self._now()
            self._good_until = read + max(_FRESH_SECONDS, read - began)
        return self._found


def _needed(path: Path, needed: Mapping[Path, str]) -> str | None:
    """The run that is to begin from ``path``, or from something in it, or from the newest beside it."""
    if not needed:
        return None
    real = path.resolve()
    return next(
        (who for place, who in needed.items() if place.is_relative_to(real) or real.is_relative_to(place)), None
    )


def _of_run(run: RunDir, state: RunStatus, needed: Mapping[Path, str], *, whole_runs: bool) -> list[Item]:
    """What may go; sizes are looked at later."""
    places = [run.checkpoints, *(RunDir(path).checkpoints for path in _parts(run))]
    if whole_runs and (why := _may_go(places, state)) is not None and _needed(run.path, needed) is None:
        return [Item(path=run.path, kind="run", run_id=run.run_id, why=why)]
    found = [item for place in places for item in _of_checkpoints(place, run.run_id)]
    return [item for item in found if _needed(item.path, needed) is None]


def _may_go(places: Sequence[Path], state: RunStatus) -> str | None:
    """Why a whole run may be deleted; None where it may not."""
    paths = [path for place in places for _, path in checkpoint_files.step_directories(place)]
    if any(is_pinned(path) for path in paths):
        return None
    parts = state.tasks or (state,)
    if all(one.state in _DONE for one in parts):
        return f"it is {state.state}"
    return None if any(_is_good(path) for path in paths) else f"it is {state.state}, without a checkpoint to go on from"


def _of_checkpoints(place: Path, run_id: str) -> Iterator[Item]:
    """All checkpoints but the newest good one, those that are pinned, and everything where none is good."""
    found = checkpoint_files.step_directories(place)
    newest = next((path for _, path in found if _is_good(path)), None)
    if newest is not None:
        for _, path in found:
            if path != newest and not is_pinned(path):
                yield Item(path=path, kind="checkpoint", run_id=run_id, why=f"{newest.name} is newer")
    for path in sorted(place.iterdir()) if place.is_dir() else []:
        if path.name.startswith(_TEMPORARY) or checkpoint_files.attempt_of(path.name) is not None:
            yield Item(path=path, kind="leftover", run_id=run_id, why="it was never finished")
        elif path.name.startswith(tuple(f"{word}_step_" for word in checkpoint_files.PUT_ASIDE)) and newest is not None:
            yield Item(path=path, kind="leftover", run_id=run_id, why="it was put aside")


def _is_good(path: Path) -> bool:
    try:
        manifest.read(path)
    except Damaged:
        return False
    return True


def _size(path: Path) -> int:
    found, waiting = 0, [os.fspath(path)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        found += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue  # somebody else is cleaning, too, or it may not be read
    return found


def delete(item: Item, *, slurm: Slurm | None = None, origins: Origins | None = None) -> None:
    """Delete it, unless its run has come back to life since it was looked at, or somebody wants to keep it now.

    It is renamed first, so that nobody ever finds half of it, and given back where it was pinned, or its run resumed,
    in the moment between.

    Args:
        origins: one for all that is deleted in one go.

    Raises:
        RunDirectoryError: it may not be deleted any more, or cannot be.
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
        return  # somebody else was quicker
    except HpcaccelError as error:
        raise RunDirectoryError(f"{item.path} stays: {error}") from None
    if not now.ended:
        raise RunDirectoryError(f"{item.path} stays: its run is {now.state} again")
    _refuse_what_is_kept(item, run, now, needed)
    aside = item.path.with_name(f"{_TEMPORARY}{item.path.name.lstrip('.')}-{secrets.token_hex(2)}")
    try:
        os.rename(item.path, aside)
        record = (aside / run.record.name) if item.kind == "run" else run.record
        if _pins(aside) or record.read_bytes() != before:
            os.rename(aside, item.path)
            raise RunDirectoryError(f"{item.path} stays: it was pinned, or its run resumed, at this moment")
    except FileNotFoundError:
        return  # somebody else was quicker
    except OSError as error:
        raise _cannot_delete(item.path, error) from None
    _remove(aside, of=item.path)


def _remove(path: Path, *, of: Path) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return  # somebody else was quicker
    except OSError as error:
        raise _cannot_delete(of, error) from None


def _cannot_delete(path: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(f"{path} cannot be deleted: {error.strerror}")


def _refuse_what_is_kept(item: Item, run: RunDir, now: RunStatus, needed: Mapping[Path, str]) -> None:
    """Raises RunDirectoryError for what would not be proposed any more."""
    if pinned := _pins(item.path):
        raise RunDirectoryError(f"{item.path} stays: {pinned[0]} has been pinned meanwhile")
    if (who := _needed(item.path, needed)) is not None:
        raise RunDirectoryError(f"{item.path} stays: run {who} is to begin from it")
    found = _of_run(run, now, needed, whole_runs=item.kind == "run")
    if os.path.lexists(item.path) and item.path not in [one.path for one in found]:
        raise RunDirectoryError(f"{item.path} stays: its run has changed meanwhile")


def _pins(path: Path) -> list[str]:
    """The checkpoints in ``path`` (a checkpoint, or a whole run) that are pinned."""
    places = [path / "checkpoints", *(RunDir(part).checkpoints for part in _parts(RunDir(path)))]
    found = [path, *(one for place in places for _, one in checkpoint_files.step_directories(place))]
    return [one.name for one in found if is_pinned(one)]


def _run_of(item: Item) -> RunDir:
    if item.kind == "run":
        path = item.path
    else:
        path = item.path.parent.parent  # <run>/checkpoints/<item>
        path = path.parent.parent if path.parent.name in ("tasks", "trials") else path
    return SweepDir(path) if read_record(RunDir(path)).kind == "sweep" else RunDir(path)
