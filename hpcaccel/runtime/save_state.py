"""``save_state`` and ``load_state``: choose the directory, determine which ranks take part, and save or load."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.checkpointing import save_participants
from hpcaccel.runtime.checkpointing.project_checkpoints import NumberedCheckpoints, newest_first
from hpcaccel.runtime.checkpointing.save_participants import ParticipantTable
from hpcaccel.runtime.distributed.collectives.call_site import call_site, call_stack
from hpcaccel.runtime.rank_logger import TRAINING_LOG
from hpcaccel.runtime.training.resumption import ResumedCounters
from hpcaccel.runtime.training_session import TrainingSession

__all__ = ["load_state", "numbered", "refuse_unknown", "save_state"]

KIND_SAVE, KIND_LOAD = "save_state()", "load_state()"
_HARMLESS = {"map_location", "weights_only"}
"""Accelerate's keywords that are accepted and have no effect."""


def numbered(session: TrainingSession, configuration: Any) -> NumberedCheckpoints | None:
    """The numbered checkpoints of the project configuration; None if the configuration does not number checkpoints.

    Raises:
        RuntimeMisuse: there is no directory for numbered checkpoints.
    """
    if configuration is None or not configuration.automatic_checkpoint_naming:
        return None
    if configuration.project_dir is not None:
        return NumberedCheckpoints(configuration, Path(configuration.project_dir).absolute() / "checkpoints")
    if session.place.checkpoints is None:
        raise RuntimeMisuse("automatic_checkpoint_naming needs a directory: pass ProjectConfiguration(project_dir=...)")
    return NumberedCheckpoints(configuration, session.place.checkpoints)


def refuse_unknown(call: str, given: dict[str, Any]) -> None:
    """Refuse keywords that ``call`` does not support.

    Raises:
        RuntimeMisuse: ``given`` contains such keywords.
    """
    unknown = sorted(set(given) - _HARMLESS)
    if unknown:
        raise RuntimeMisuse(
            f"{call} does not support {', '.join(unknown)}. A checkpoint is saved and restored as a whole. To "
            "load all or some of the weights only, call hpcaccel.load_checkpoint_in_model(model, path)"
        )


def save_state(session: TrainingSession, directory: Path | None, numbers: NumberedCheckpoints | None) -> Path:
    """Save all prepared and registered objects.

    If the model is not sharded, ranks other than 0 may be missing: rank 0 waits for them for a short time and saves
    without them. The checkpoint then lacks their random states, which a warning and the manifest record.

    Returns:
        The checkpoint's directory.

    Raises:
        RuntimeMisuse: there is no directory; rank 0 did not make this call; the model is sharded, and some ranks did
            not make this call within the control timeout.
        CheckpointError: on all ranks that made this call, if saving failed on any of them, or if the numbered
            checkpoint already exists. If rank 0 saves alone, it raises RuntimeMisuse for an existing checkpoint.
    """
    settings, loop = session.settings, session.loop
    place = directory if numbers is None else numbers.next
    if place is None and not loop.context.checkpoints.has_place:
        raise RuntimeMisuse(
            f"{KIND_SAVE} was called without a path, and there is no run directory. Pass a path or set project_dir"
        )
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


def _save(
    session: TrainingSession, place: Path | None, numbers: NumberedCheckpoints | None, attendance: ParticipantTable
) -> Path:
    if numbers is not None:
        assert place is not None
        _check_free(session, numbers, place, alone=not attendance.complete)
    path = session.loop.saves.now("save_state", place, missing=attendance.missing)
    if numbers is not None and session.group.is_main:
        assert place is not None
        numbers.prune(place)
    return path if place is None else place


def _check_free(session: TrainingSession, numbers: NumberedCheckpoints, place: Path, *, alone: bool) -> None:
    """Refuse a directory that exists. Rank 0 checks this before any rank writes."""
    from hpcaccel.checkpoint.rank_agreement import CheckpointRanks

    if alone:
        numbers.refuse_existing(place)
        return
    ranks = CheckpointRanks.of(session.group)
    ranks.first("save_state() failed", lambda: numbers.refuse_existing(place))


def _save_without_some(
    session: TrainingSession,
    place: Path | None,
    numbers: NumberedCheckpoints | None,
    attendance: ParticipantTable,
    *,
    limit: float,
) -> Path:
    """Save on rank 0 alone. On the other ranks that made the call, wait for rank 0 and return its result."""
    meetings = save_participants.participants_of(session.group)
    if not session.group.is_main:
        if session.group.rank in attendance.missing:
            _warn(
                f"rank {session.group.rank} called {KIND_SAVE} at {call_site()} too late: the checkpoint that rank 0 "
                "saved does not contain the random state of this rank. Rank 0 waits for at most "
                "runtime.save_wait_seconds: increase it, or make the call on all ranks at about the same time"
            )
        return Path(meetings.result(attendance.meeting, limit=limit))
    try:
        path = _save(session, place, numbers, attendance)
    except BaseException as error:
        meetings.report(attendance.meeting, problem=f"{type(error).__name__}: {error}")
        raise
    meetings.report(attendance.meeting, done=str(path))
    who = f"rank{'s' if len(attendance.missing) > 1 else ''} {', '.join(map(str, attendance.missing))}"
    _warn(
        f"{KIND_SAVE} at {call_site()} was not called by {who}, so {path} does not contain the random state of {who}. "
        f"Training resumed from this checkpoint is exact on the other ranks only. Call {KIND_SAVE} on all ranks, "
        "outside `if accelerator.is_main_process:`. Each file is still written only once"
    )
    return path


_warned: set[tuple[str, ...]] = set()


def _warn(text: str) -> None:
    """Warn once per call stack."""
    stack = tuple(call_stack())
    if stack not in _warned:
        _warned.add(stack)
        warnings.warn(text, stacklevel=5)


def load_state(
    session: TrainingSession, directory: Path | None, numbers: NumberedCheckpoints | None
) -> ResumedCounters:
    """Restore a checkpoint. All ranks call this.

    Args:
        directory: a checkpoint, or a directory of checkpoints, of which the newest undamaged one is used. If None, the
            newest of the run's checkpoints and the numbered checkpoints is used.

    Raises:
        RuntimeMisuse: ``directory`` is None, and there is no checkpoint; or some ranks did not make this call within
            the control timeout.
        CheckpointError: the checkpoint is missing, damaged, or belongs to other objects.
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
        path = session.loop.context.checkpoints.find_in(given)
        if path is None:
            raise RuntimeMisuse(
                f"load_state({where!r}): no checkpoint found. Pass a checkpoint, or a directory of checkpoints"
            )
        resumed = session.loop.load(path, given=given)
    else:
        resumed = _load_newest(session, numbers)
    if numbers is not None:
        numbers.loaded()
    return resumed


def _load_newest(session: TrainingSession, numbers: NumberedCheckpoints | None) -> ResumedCounters:
    from hpcaccel.checkpoint.rank_agreement import Damaged

    loop = session.loop
    if numbers is None and not loop.context.checkpoints.has_place:
        raise RuntimeMisuse(
            f"{KIND_LOAD} was called without a path, and there is no run directory. Pass a path or set project_dir"
        )
    own = loop.context.checkpoints.find()
    others = [] if numbers is None else numbers.all()
    found: list[Path] = session.group.from_main(newest_first([*others, *([own.parent] if own else [])]))
    problem: Damaged | None = None
    for path in found:
        if own is not None and path.parent == own.parent and path != own:
            continue  # the run resumes from the checkpoint ``own``
        try:
            return loop.load(path, given=None if path == own else path.parent, fall_back=path == own)
        except Damaged as error:
            problem = error
            logging.getLogger(TRAINING_LOG).info("skipping a damaged checkpoint: %s", error)
    if problem is not None:
        raise problem
    raise RuntimeMisuse(f"{KIND_LOAD} found no checkpoint. The first attempt of a run has none: skip this call there")
