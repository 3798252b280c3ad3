"""Lookup of checkpoints: by ``RUN``, ``RUN@1200``, or the path of a checkpoint or of a directory of checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import manifest as sealed
from hpcaccel.checkpoint_files import pin, unpin
from hpcaccel.core.durable_files import read_json
from hpcaccel.core.launch_spec import find_launch
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import CheckpointError, Damaged, RunNotFound, UserError
from hpcaccel.submission.jobs.job_submission import may_have_job

__all__ = [
    "Origin",
    "find_checkpoint",
    "find_origin",
    "find_place",
    "find_watching_run",
    "held",
    "is_checkpoint_of_run",
    "unpin_origin",
]

_SHOWN = 12


@dataclass(frozen=True)
class Origin:
    """The checkpoint from which a new run starts."""

    path: Path
    step: int
    run_id: str | None
    """The run that saved the checkpoint; None if the checkpoint is not in a run directory."""

    @property
    def label(self) -> str:
        return str(self.path) if self.run_id is None else f"{self.run_id}@{self.step}"

    @property
    def may_vanish(self) -> bool:
        """Whether the run that saved the checkpoint may delete it before the new run starts.

        True if the user cannot write to the checkpoint and therefore cannot pin it.
        """
        return self.run_id is not None and not os.access(self.path, os.W_OK)

    @property
    def advice(self) -> str:
        """The warning for the user if ``may_vanish``."""
        return (
            f"{self.path} cannot be pinned, because you cannot write to it: the run that saved it may delete it before "
            "the new run starts. Copy it to a directory that you own, and start from the copy"
        )

    def to_json(self) -> dict[str, Any]:
        return {"checkpoint": str(self.path), "step": self.step, "run_id": self.run_id}


def find_origin(token: str | os.PathLike[str]) -> Origin:
    """Find the checkpoint ``token`` and check its manifest and the sizes of its files.

    Raises:
        RunNotFound: ``token`` is neither a run nor a path.
        UserError: ``token`` is an array or a sweep, or the part after @ is not a step.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    path = find_checkpoint(token)
    manifest = sealed.read(path)
    run = RunDir(path.parent.parent)
    in_run = path.parent == run.checkpoints and run.record.exists()
    return Origin(path, int(manifest["step"]), run.run_id if in_run else None)


def find_checkpoint(token: str | os.PathLike[str]) -> Path:
    """Find the checkpoint that ``token`` names: that of the step after @, else the newest intact checkpoint.

    Raises:
        RunNotFound: ``token`` is neither a run nor a path.
        UserError: ``token`` is an array or a sweep, or the part after @ is not a step.
        CheckpointError: there is no such checkpoint, or none is intact.
    """
    base, step = _split(os.fspath(token))
    place = find_place(base)
    if (place / checkpoint_files.MANIFEST).exists():
        if step is not None:
            raise CheckpointError(f"{place} is a single checkpoint: remove @{step} from {os.fspath(token)!r}")
        return place
    found = checkpoint_files.step_directories(place)
    if step is not None:
        return _of_step(found, step, place)
    problems = []
    for _, path in found:
        try:
            sealed.read(path)
        except Damaged as error:
            problems.append(str(error))
        else:
            return path
    damaged = f", only damaged ones: {'; '.join(problems)}" if problems else ""
    raise CheckpointError(f"there is no intact checkpoint in {place}{damaged}")


def find_place(token: str) -> Path:
    """The absolute path that ``token`` names: that of a single checkpoint, or of a directory that has checkpoints.

    Raises:
        RunNotFound: ``token`` is neither a run nor a path.
        UserError: ``token`` is an array or a sweep.
        CheckpointError: the path does not exist or has no checkpoints.
    """
    path = Path(os.path.expanduser(token)).absolute()
    if path.exists():
        for place in (path, path / "checkpoints"):
            if (place / checkpoint_files.MANIFEST).exists() or checkpoint_files.step_directories(place):
                return place
        if RunDir(path).record.exists() or os.sep in token:
            raise CheckpointError(f"there is no checkpoint in {path}")
    elif os.sep in token:
        raise CheckpointError(f"{path} does not exist")
    return _run_of(token).checkpoints


def find_watching_run(token: str) -> RunDir | None:
    """The run that ``token`` names, if its spec has ``checkpoint.watch``; None for anything else.

    Raises:
        RunNotFound: ``token`` is neither a run nor a path.
        UserError: ``token`` is an array or a sweep.
    """
    path = Path(os.path.expanduser(token)).absolute()
    if RunDir(path).record.exists():
        run = RunDir(path)
    elif path.exists() or os.sep in token:
        return None
    else:
        run = _run_of(token)
    launch = find_launch(run)
    return run if launch is not None and launch.watch is not None else None


def _run_of(token: str) -> RunDir:
    from hpcaccel.submission.runs.find import find_run
    from hpcaccel.submission.runs.run_handle import RunArray, SweepRun

    try:
        run = find_run(token)
    except RunNotFound as error:
        raise RunNotFound(f"{error}\nThere is no path {token!r} either") from None
    if isinstance(run, RunArray):
        raise UserError(f"{run.run_id} is an array of {len(run)} runs; choose one of them, such as {run.run_id}_0")
    if isinstance(run, SweepRun):
        raise UserError(f"{run.run_id} is a sweep; choose one of its trials, such as {run.run_id}_0")
    return run.dir


def is_checkpoint_of_run(token: str) -> bool:
    """Whether ``token`` names a step of a run (``RUN@1200``)."""
    return _split(token)[1] is not None


def _split(token: str) -> tuple[str, int | None]:
    """Split ``gpt@1200`` into name and step, unless a path of that name exists."""
    base, at, step = token.rpartition("@")
    if not at or not base or os.path.exists(token):
        return token, None
    match = re.fullmatch(r"(?:step_)?(\d+)", step)
    if match is None:
        raise UserError(f"{token!r}: the part after @ must be a step, as in {base}@1200, not {step!r}")
    return base, int(match[1])


def _of_step(found: list[tuple[int, Path]], step: int, place: Path) -> Path:
    for other, path in found:
        if other == step:
            sealed.read(path)
            return path
    steps = [str(other) for other, _ in reversed(found)]
    known = ", ".join(steps[-_SHOWN:]) or "none"
    raise CheckpointError(f"there is no checkpoint of step {step} in {place} (steps: {known})")


@contextmanager
def held(origin: Origin | None, *, run_id: str) -> Iterator[None]:
    """Pin the checkpoint from which a run starts, so that the run that saved it keeps it. Unpin it if the block fails.

    A checkpoint that ``may_vanish`` or is not in a run directory is not pinned. If the failed block may have left a
    job, the pin stays.

    Raises:
        Damaged: the checkpoint was deleted or damaged in the meantime.
    """
    if origin is None or origin.run_id is None or origin.may_vanish:
        yield
        return
    try:
        ours = pin(origin.path, why=_why(run_id))
    except FileNotFoundError:
        raise Damaged(f"{origin.path} was deleted in the meantime") from None
    try:
        sealed.read(origin.path)
        yield
    except BaseException as error:
        if ours and not may_have_job(error):
            unpin(origin.path)
        raise


def unpin_origin(branched_from: Mapping[str, Any] | None, *, run_id: str) -> None:
    """Remove the pin of a run that never had a job.

    Args:
        branched_from: the field of this name in the run's record.
    """
    if branched_from is None:
        return
    path = Path(branched_from["checkpoint"])
    if (read_json(path / checkpoint_files.PINNED) or {}).get("why") == _why(run_id):
        unpin(path)


def _why(run_id: str) -> str:
    return f"run {run_id} branches from it"
