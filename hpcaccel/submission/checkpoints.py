"""Finding a checkpoint by what a person writes: ``RUN``, ``RUN@1200``, or the path of one or of a directory of them."""

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
from hpcaccel.checkpoint_files.pins import pin, unpin
from hpcaccel.core.run_dir import RunDir, read_json
from hpcaccel.errors import CheckpointError, Damaged, RunNotFound, SlurmCommandError, SlurmUnreachable, UserError

__all__ = ["Origin", "find_checkpoint", "find_origin", "find_place", "held", "is_checkpoint_of_run", "let_go"]

_SHOWN = 12


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a new run branches from."""

    path: Path
    step: int
    run_id: str | None
    """Of the run that made it; None where it does not lie in a run."""

    @property
    def in_words(self) -> str:
        return str(self.path) if self.run_id is None else f"{self.run_id}@{self.step}"

    @property
    def may_vanish(self) -> bool:
        """Whether its run may delete it before the new one starts, because it cannot be pinned from here."""
        return self.run_id is not None and not os.access(self.path, os.W_OK)

    def to_json(self) -> dict[str, Any]:
        return {"checkpoint": str(self.path), "step": self.step, "run_id": self.run_id}


def find_origin(token: str | os.PathLike[str]) -> Origin:
    """The checkpoint of ours that ``token`` names, its manifest and the sizes of its files checked.

    Raises:
        RunNotFound: neither a run nor a path.
        CheckpointError: no such checkpoint there, or a damaged one.
    """
    path = find_checkpoint(token)
    manifest = sealed.read(path)
    run = RunDir(path.parent.parent)
    in_run = path.parent == run.checkpoints and run.record.exists()
    return Origin(path, int(manifest["step"]), run.run_id if in_run else None)


def find_checkpoint(token: str | os.PathLike[str]) -> Path:
    """The checkpoint of ours that ``token`` names: of that step, else the newest good one.

    Raises:
        RunNotFound: neither a run nor a path.
        CheckpointError: no such checkpoint there, or none that is good.
    """
    base, step = _split(os.fspath(token))
    place = find_place(base)
    if (place / checkpoint_files.MANIFEST).exists():
        if step is not None:
            raise CheckpointError(f"{place} is one checkpoint: leave out @{step}")
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
    raise CheckpointError(f"there is no good checkpoint in {place}{damaged}")


def find_place(token: str) -> Path:
    """The directory that ``token`` names, absolute: a run's checkpoints, or what lies at that path.

    Raises:
        RunNotFound: neither a run nor a path.
        CheckpointError: a path where no checkpoints are.
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


def _run_of(token: str) -> RunDir:
    from hpcaccel.submission.find import find_run
    from hpcaccel.submission.run_handle import RunArray, SweepRun

    try:
        run = find_run(token)
    except RunNotFound as error:
        raise RunNotFound(f"{error}\nA path would do as well, and there is none of that name") from None
    if isinstance(run, RunArray):
        raise UserError(f"{run.run_id} is an array of {len(run)} runs; name one of them, such as {run.run_id}_0")
    if isinstance(run, SweepRun):
        raise UserError(f"{run.run_id} is a sweep; name one of its trials, such as {run.run_id}_0")
    return run.dir


def is_checkpoint_of_run(token: str) -> bool:
    """Whether it names a single checkpoint, ``RUN@1200``, rather than a run."""
    return _split(token)[1] is not None


def _split(token: str) -> tuple[str, int | None]:
    """``gpt@1200`` is a name and a step, unless there is a path of that name."""
    base, at, step = token.rpartition("@")
    if not at or not base or os.path.exists(token):
        return token, None
    match = re.fullmatch(r"(?:step_)?(\d+)", step)
    if match is None:
        raise UserError(f"{token!r}: behind the @ stands a step, such as {base}@1200, not {step!r}")
    return base, int(match[1])


def _of_step(found: list[tuple[int, Path]], step: int, place: Path) -> Path:
    for other, path in found:
        if other == step:
            sealed.read(path)
            return path
    steps = [str(other) for other, _ in reversed(found)]
    known = ", ".join(steps[-_SHOWN:]) or "none yet"
    raise CheckpointError(f"there is no checkpoint of step {step} in {place} (steps: {known})")


@contextmanager
def held(origin: Origin | None, *, run_id: str) -> Iterator[None]:
    """Pin the checkpoint that a run begins from, so that its own run does not delete it before; not if the block fails.

    Raises:
        Damaged: it has gone meanwhile.
    """
    if origin is None or origin.run_id is None or origin.may_vanish:
        yield
        return
    try:
        ours = pin(origin.path, why=_why(run_id))
    except FileNotFoundError:
        raise Damaged(f"{origin.path} has been deleted meanwhile") from None
    try:
        sealed.read(origin.path)
        yield
    except BaseException as error:
        may_be_taken = isinstance(error, SlurmCommandError) and not isinstance(error, SlurmUnreachable)
        if ours and not may_be_taken:
            unpin(origin.path)
        raise


def let_go(branched_from: Mapping[str, Any] | None, *, run_id: str) -> None:
    """Take out the pin that a run had made, which never had a job.

    Args:
        branched_from: as the run's record says.
    """
    if branched_from is None:
        return
    path = Path(branched_from["checkpoint"])
    if (read_json(path / checkpoint_files.PINNED) or {}).get("why") == _why(run_id):
        unpin(path)


def _why(run_id: str) -> str:
    return f"run {run_id} branches from it"
