"""Files of a sweep's trials: pins checkpoints that other trials start from, and removes files no longer needed.

Several workers may clean up at once. A checkpoint is renamed before it is removed, and only one worker can rename it.
Pinned checkpoints are kept. Removing files takes time, so it is deferred until the next trial runs and the GPUs are
busy.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import is_pinned, pin, unpin
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import RunDirectoryError
from hpcaccel.sweeps.journal_notes import BUDGET, CHECKPOINT, ERROR_CLASS, FROM, OwnershipNotes
from hpcaccel.sweeps.journal_reader import StudyRecord, TrialRecord
from hpcaccel.sweeps.results import Goal, best_first

__all__ = [
    "CheckpointCleanup",
    "DeferredCleanup",
    "drop_checkpoints",
    "fold",
    "pin_source",
    "source_of",
    "unpin_source",
]


def source_of(sweep: SweepDir, marks: Mapping[str, Any]) -> Path | None:
    """The checkpoint from which a trial with the user attributes ``marks`` starts; None if there is none."""
    if FROM not in marks:
        return None
    noted = marks.get(CHECKPOINT)
    if noted is not None and (sweep.path / str(noted) / checkpoint_files.MANIFEST).exists():
        return sweep.path / str(noted)
    newest = checkpoint_files.newest(sweep.trial(marks[FROM]).checkpoints)
    return None if newest is None else newest.path


def pin_source(sweep: SweepDir, trial: TrialRecord) -> Path | None:
    """Pin the checkpoint that a continuation of ``trial`` starts from; ``unpin_source`` removes the pin.

    This is the newest checkpoint that ``trial`` has saved or, if there is none, the one from which ``trial`` started.
    Other pins of the checkpoint are kept. Returns None if there is no checkpoint.

    Raises:
        RunDirectoryError: the checkpoint's directory cannot be written.
    """
    while (path := _newest(sweep, trial)) is not None:
        try:
            pin(path, why=_why(sweep))
        except FileNotFoundError:
            continue  # another process has just removed it
        except OSError as error:
            raise RunDirectoryError(f"cannot pin {path}: {error.strerror or error}") from error
        if (path / checkpoint_files.MANIFEST).exists():
            return path
    return None


def _newest(sweep: SweepDir, trial: TrialRecord) -> Path | None:
    newest = checkpoint_files.newest(sweep.trial(trial.number).checkpoints)
    return source_of(sweep, trial.user_attrs) if newest is None else newest.path


def unpin_source(sweep: SweepDir, trial: TrialRecord, trials: Iterable[TrialRecord]) -> int | None:
    """Unpin the checkpoint that ``trial``, which has ended, started from.

    Returns:
        The number of the trial that wrote the checkpoint; None if there is no checkpoint, or another trial may need it.

    Raises:
        OSError: the checkpoint's directory cannot be written.
    """
    path = source_of(sweep, trial.user_attrs)
    if path is None or (
        trial.state == "failed" and checkpoint_files.newest(sweep.trial(trial.number).checkpoints) is None
    ):
        return None  # a retry of the trial would start from this checkpoint
    others = (other for other in trials if other.number != trial.number and not other.is_finished)
    if any(source_of(sweep, other.user_attrs) == path for other in others):
        return None
    if is_pinned(path) and _why(sweep) in (path / checkpoint_files.PINNED).read_text(encoding="utf-8"):
        unpin(path)
    return int(path.parent.parent.name)


def _why(sweep: SweepDir) -> str:
    return f"a trial of sweep {sweep.run_id} goes on from it"  # identifies our own pins on disk: do not change


SIGNS_OF_LIFE = ("heartbeats", "stacks")


class CheckpointCleanup:
    """Removes files that ended trials no longer need.

    Args:
        keep: number of best complete trials whose checkpoints are kept; None to keep all.
    """

    def __init__(self, sweep: SweepDir, *, keep: int | None) -> None:
        self.sweep = sweep
        self.keep = keep
        self._done: set[int] = set()

    def after_pruned(self, number: int) -> None:
        drop_checkpoints(self.sweep.trial(number))
        fold(self.sweep.trial(number))

    def after_interrupted(self, number: int) -> None:
        """Clean up after a trial that failed or was stopped by the budget. The newest checkpoint is kept for a
        continuation, and the last attempt's files are kept for the user."""
        drop_checkpoints(self.sweep.trial(number), all_but_newest=True)
        fold(self.sweep.trial(number), signs_of_life=True)

    def after_finished(self, number: int, best_first: Sequence[int]) -> None:
        """Clean up after a complete trial. ``best_first`` lists the numbers of all complete trials, best first."""
        fold(self.sweep.trial(number))
        self.drop_worse(best_first)

    def drop_worse(self, best_first: Iterable[int]) -> None:
        """Remove the checkpoints of complete trials that are not among the best."""
        if self.keep is None:
            return
        for number in list(best_first)[self.keep :]:
            if number not in self._done:
                drop_checkpoints(self.sweep.trial(number))
                self._done.add(number)

    def after_succeeded(self, trial: TrialRecord, best_first: Sequence[int]) -> None:
        """Clean up after a trial whose continuation has ended and no longer needs the trial's checkpoint."""
        if trial.state == "complete":
            self._done.discard(trial.number)
            self.drop_worse(best_first)
        else:
            drop_checkpoints(self.sweep.trial(trial.number))


def drop_checkpoints(run: RunDir, *, all_but_newest: bool = False) -> int:
    """Remove the checkpoints of an ended trial, and the temporary directories of killed saves.

    Pinned checkpoints are kept. A failure to remove a directory is not an error.

    Returns:
        The number of removed checkpoints.
    """
    newest = checkpoint_files.newest(run.checkpoints) if all_but_newest else None
    gone = 0
    for step, path in checkpoint_files.step_directories(run.checkpoints):
        if newest is None or path != newest.path:
            gone += _drop(path, step)
    for path in _left_behind(run.checkpoints):
        shutil.rmtree(path, ignore_errors=True)
    return gone


def _drop(path: Path, step: int) -> bool:
    if is_pinned(path):
        return False
    # The name is unique: another process may be removing the same checkpoint, or may have died while removing it.
    doomed = path.with_name(checkpoint_files.temporary_name(step, f"deleted-{os.getpid()}-{os.urandom(3).hex()}"))
    try:
        os.rename(path, doomed)
    except OSError:
        return False  # another worker was first, or there is no permission
    if is_pinned(doomed):  # pinned between the check and the rename
        os.rename(doomed, path)
        return False
    shutil.rmtree(doomed, ignore_errors=True)
    return True


def _left_behind(directory: Path) -> list[Path]:
    """Temporary directories of killed saves and deletions, except pinned ones."""
    try:
        return [path for path in directory.iterdir() if path.name.startswith(".step_") and not is_pinned(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def fold(run: RunDir, *, signs_of_life: bool = False) -> None:
    """Remove the folders of an ended trial's earlier attempts (their metrics files are kept) and, unless
    ``signs_of_life`` is true, the heartbeats and stacks of the last attempt.

    Args:
        signs_of_life: whether to keep the last attempt's heartbeats and stacks.
    """
    *earlier, last = _attempts(run) or [0]
    for number in earlier:
        _empty(run.attempt(number), keep=run.foreign_metrics(number).name)
    for name in () if signs_of_life else SIGNS_OF_LIFE:
        shutil.rmtree(run.attempt(last) / name, ignore_errors=True)


def _attempts(run: RunDir) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(run.attempts) if name.isdecimal())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _empty(folder: Path, *, keep: str) -> None:
    """Remove a folder; if it has a file ``keep``, remove everything except that file."""
    if not (folder / keep).exists():
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != keep:
            path.unlink(missing_ok=True)


class DeferredCleanup:
    """Clean-up tasks for ended trials, queued until ``run`` is called.

    Args:
        keep: number of best complete trials whose checkpoints are kept; None to keep all.
        record: the study; the caller keeps it up to date.
    """

    def __init__(self, sweep: SweepDir, *, keep: int | None, goal: Goal, record: StudyRecord) -> None:
        self._sweep = sweep
        self._cleanup = CheckpointCleanup(sweep, keep=keep)
        self._goal = goal
        self._record = record
        self._tasks: deque[Callable[[], None]] = deque()

    def add(self, number: int) -> None:
        """Queue the clean-up after a trial that has ended."""
        self._tasks.append(lambda: self._clean_up(self._record.trials[number]))

    def catch_up(self, worker: int, notes: OwnershipNotes) -> None:
        """Queue the tasks that an earlier tuner of this worker may not have completed before it died."""
        for number, claim in list(notes.claims.items()):
            trial = self._record.trials[number]
            if claim.worker == worker and trial.is_finished and (trial.state != "complete" or FROM in trial.user_attrs):
                self.add(number)
        self._tasks.append(lambda: self._cleanup.drop_worse(best_first(self._record.trials, self._goal)))

    def run(self) -> list[str]:
        """Run all queued tasks.

        Returns:
            Messages about failures, which waste disk space but have no other effect.
        """
        problems = []
        while self._tasks:
            try:
                self._tasks.popleft()()
            except OSError as error:
                problems.append(f"cannot remove files of an ended trial: {error}")
        return problems

    def _clean_up(self, trial: TrialRecord) -> None:
        if trial.state == "complete":
            self._cleanup.after_finished(trial.number, best_first(self._record.trials, self._goal))
        elif trial.state == "pruned" and trial.user_attrs.get(ERROR_CLASS) != BUDGET:
            self._cleanup.after_pruned(trial.number)
        else:
            self._cleanup.after_interrupted(trial.number)
        if (source := unpin_source(self._sweep, trial, self._record.trials)) is not None:
            self._cleanup.after_succeeded(self._record.trials[source], best_first(self._record.trials, self._goal))
