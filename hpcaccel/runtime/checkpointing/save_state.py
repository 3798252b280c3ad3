"""``save_state`` and ``load_state``: where to, who takes part, what comes back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.checkpointing import save_participants
from hpcaccel.runtime.checkpointing.project_checkpoints import Numbered, newest_first
from hpcaccel.runtime.checkpointing.save_participants import Attendance
from hpcaccel.runtime.distributed.collectives.call_site import call_site, call_stack
from hpcaccel.runtime.training.counters import Resumed
from hpcaccel.runtime.training_session import Session

__all__ = ["load_state", "numbered", "refuse_unknown", "save_state"]

KIND_SAVE, KIND_LOAD = "save_state()", "load_state()"
_HARMLESS = {"map_location", "weights_only"}
"""Keywords of Accelerate's whose wish is fulfilled in any case."""


def numbered(session: Session, configuration: Any) -> Numbered | None:
    """The checkpoints that the script has asked to be numbered.

    Raises:
        RuntimeMisuse: it has, and there is no directory for them.
    """
    if configuration is None or not configuration.automatic_checkpoint_naming:
        return None
    if configuration.project_dir is not None:
        return Numbered(configuration, Path(configuration.project_dir).absolute() / "checkpoints")
    if session.place.checkpoints is None:
        raise RuntimeMisuse("automatic_checkpoint_naming needs a directory: give ProjectConfiguration(project_dir=...)")
    return Numbered(configuration, session.place.checkpoints)


def refuse_unknown(call: str, given: dict[str, Any]) -> None:
    """
    Raises:
        RuntimeMisuse: keywords whose wish would not be fulfilled.
    """
    unknown = sorted(set(given) - _HARMLESS)
    if unknown:
        raise RuntimeMisuse(
            f"{call} knows no {', '.join(unknown)}. A checkpoint is restored whole, or it is an error; weights alone, "
            "in part too, are loaded by hpcaccel.load_checkpoint_in_model(model, path)"
        )


def save_state(session: Session, directory: Path | None, numbers: Numbered | None) -> Path:
    """Save everything prepared and registered; where to comes back.

    Ranks that hold the same, as under DDP, need not all come: rank 0 waits for them a short time and saves without
    those who are missing. Their random state is then in no checkpoint, of which one warning and the manifest tell.

    Raises:
        RuntimeMisuse: there is no place to save to; the numbered checkpoint exists; the model is sharded, and some
            ranks did not come within the control timeout.
        CheckpointError: on all ranks that came, when it could not be saved on any.
    """
    settings, loop = session.settings, session.loop
    place = directory if numbers is None else numbers.next
    if place is None and not loop.saver.has_place:
        raise RuntimeMisuse(f"{KIND_SAVE} without a path, and there is no run directory. Give a path or project_dir")
    sharded = session.prepared.is_sharded
    control, patient = settings.control_timeout_seconds, session.world.timeout.total_seconds()
    attendance = save_participants.attend(
        session.group,
        KIND_SAVE,
        where="" if place is None else str(place),
        step=loop.step,
        needs_all=sharded,
        patience=control if sharded else settings.save_wait_seconds,
        limit=control if sharded else patient,
    )
    place = Path(attendance.where) if attendance.where else None
    if attendance.complete:
        path = _save(session, place, numbers, attendance)
    else:
        path = _save_without_some(session, place, numbers, attendance, limit=patient)
    if numbers is not None:
        numbers.saved(path)
    return path


def _save(session: Session, place: Path | None, numbers: Numbered | None, attendance: Attendance) -> Path:
    if numbers is not None:
        assert place is not None
        _agreed(session, numbers, place, alone=not attendance.complete)
    path = session.loop.save("save_state", place, missing=attendance.missing)
    if numbers is not None and session.group.is_main:
        assert place is not None
        numbers.prune(place)
    return path if place is None else place


def _agreed(session: Session, numbers: Numbered, place: Path, *, alone: bool) -> None:
    """Whether the place is free, as rank 0 sees it before anybody writes."""
    from hpcaccel.checkpoint.rank_agreement import Ranks

    if alone:
        numbers.refuse_existing(place)
        return
    ranks = Ranks(rank=session.group.rank, world_size=session.group.world_size, group=session.group.control)
    ranks.first("save_state() cannot save", lambda: numbers.refuse_existing(place))


def _save_without_some(
    session: Session, place: Path | None, numbers: Numbered | None, attendance: Attendance, *, limit: float
) -> Path:
    """Rank 0 saves alone; others that came hear how it went."""
    meetings = save_participants.of(session.group)
    if not session.group.is_main:
        if session.group.rank in attendance.missing:
            _warn(
                f"rank {session.group.rank} came too late to {KIND_SAVE} at {call_site()}: rank 0 has saved without "
                "its random state. runtime.save_wait_seconds says how long it waits"
            )
        return Path(meetings.result(attendance.meeting, limit=limit))
    try:
        path = _save(session, place, numbers, attendance)
    except BaseException as error:
        meetings.report(attendance.meeting, problem=f"{type(error).__name__}: {error}")
        raise
    meetings.report(attendance.meeting, done=str(path))
    who = ", ".join(map(str, attendance.missing))
    _warn(
        f"{KIND_SAVE} at {call_site()} was not called by rank {who}, whose random state is missing in {path}: a "
        "training that goes on from it repeats the others' exactly, but not theirs. Call it on all ranks, outside of "
        "`if accelerator.is_main_process:`; every file is written once all the same, and nobody waits"
    )
    return path


_warned: set[tuple[str, ...]] = set()


def _warn(text: str) -> None:
    """Once for each way through the script."""
    way = tuple(call_stack())
    if way not in _warned:
        _warned.add(way)
        warnings.warn(text, stacklevel=5)


def load_state(session: Session, directory: Path | None, numbers: Numbered | None) -> Resumed:
    """Restore the checkpoint ``directory`` or the newest good one in it; without one the newest of the run and of
    those that the script numbers. All ranks call.

    Raises:
        RuntimeMisuse: nothing to load; or some ranks did not come within the control timeout.
        CheckpointError: there is none, it is damaged, or it belongs to something else.
    """
    seconds = session.settings.control_timeout_seconds
    where = "" if directory is None else str(directory)
    attendance = save_participants.attend(
        session.group,
        KIND_LOAD,
        where=where,
        step=session.loop.step,
        needs_all=True,
        patience=seconds,
        limit=seconds,
    )
    if attendance.where:
        given = Path(attendance.where)
        path = session.loop.saver.find_in(given)
        if path is None:
            raise RuntimeMisuse(f"load_state({where!r}) found no checkpoint there")
        resumed = session.loop.load(path, given=given)
    else:
        resumed = _load_newest(session, numbers)
    if numbers is not None:
        numbers.loaded()
    return resumed


def _load_newest(session: Session, numbers: Numbered | None) -> Resumed:
    from hpcaccel.checkpoint.rank_agreement import Damaged

    loop = session.loop
    if numbers is None and not loop.saver.has_place:
        raise RuntimeMisuse(f"{KIND_LOAD} without a path, and there is no run directory. Give a path or project_dir")
    own = loop.saver.find()
    others = [] if numbers is None else numbers.all()
    found: list[Path] = session.group.from_main(newest_first([*others, *([own.parent] if own else [])]))
    problem: Damaged | None = None
    for path in found:
        if own is not None and path.parent == own.parent and path != own:
            continue  # not the one that the run goes on from
        try:
            return loop.load(path, given=None if path == own else path.parent, fall_back=path == own)
        except Damaged as error:
            problem = error
            if session.group.is_main:
                print(f"hpcaccel: {path} is damaged and passed over: {error}", flush=True)
    if problem is not None:
        raise problem
    raise RuntimeMisuse(f"{KIND_LOAD} found no checkpoint to load; the first attempt of a run has none")
