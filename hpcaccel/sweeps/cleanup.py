"""What trials leave on the disk: checkpoints that nobody will go on from, logs of attempts that others have followed.

Several workers may tidy up at once: a checkpoint is taken away by a rename, which one of them wins. Pinned ones stay.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files.pins import is_pinned
from hpcaccel.core.run_dir import RunDir, SweepDir
from hpcaccel.sweeps.journal_reader import TrialRecord

__all__ = ["Housekeeping", "drop_checkpoints", "fold"]

SIGNS_OF_LIFE = ("heartbeats", "stacks")


class Housekeeping:
    """Keeps a sweep's directory small.

    Args:
        keep: of how many of the best finished trials checkpoints stay; None: of all.
    """

    def __init__(self, sweep: SweepDir, *, keep: int | None) -> None:
        self.sweep = sweep
        self.keep = keep
        self._done: set[int] = set()

    def after_pruned(self, number: int) -> None:
        drop_checkpoints(self.sweep.trial(number))
        fold(self.sweep.trial(number))

    def after_interrupted(self, number: int) -> None:
        """Of a trial that failed, or for which the budget did not suffice: `sweep retry-failed` and `extend` go on from
        its newest checkpoint, and the last attempt's logs say what was wrong."""
        drop_checkpoints(self.sweep.trial(number), all_but_newest=True)
        fold(self.sweep.trial(number), signs_of_life=True)

    def after_finished(self, number: int, best_first: Sequence[int]) -> None:
        """Args:
        best_first: all finished trials.
        """
        fold(self.sweep.trial(number))
        self.drop_worse(best_first)

    def drop_worse(self, best_first: Iterable[int]) -> None:
        """Take away the checkpoints of finished trials that are not among the best."""
        if self.keep is None:
            return
        for number in list(best_first)[self.keep :]:
            if number not in self._done:
                drop_checkpoints(self.sweep.trial(number))
                self._done.add(number)

    def after_succeeded(self, trial: TrialRecord, best_first: Sequence[int]) -> None:
        """Of a trial from which another one went on, which has ended and left a checkpoint, or needs none any more."""
        if trial.state == "complete":
            self._done.discard(trial.number)
            self.drop_worse(best_first)
        else:
            drop_checkpoints(self.sweep.trial(trial.number))


def drop_checkpoints(run: RunDir, *, all_but_newest: bool = False) -> int:
    """Remove the checkpoints of a trial that has ended, and what killed saves left; returns how many went.

    What cannot be removed stays: it costs space, and no trial.
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
    # A name of this process's own: somebody else may be at the same checkpoint, or have died at it.
    doomed = path.with_name(checkpoint_files.temporary_name(step, f"deleted-{os.getpid()}-{os.urandom(3).hex()}"))
    try:
        os.rename(path, doomed)
    except OSError:
        return False  # another worker was first, or it may not be removed
    if is_pinned(doomed):  # in this very moment
        os.rename(doomed, path)
        return False
    shutil.rmtree(doomed, ignore_errors=True)
    return True


def _left_behind(directory: Path) -> list[Path]:
    """Temporary directories of saves and deletions that were killed; what somebody pinned is none of them."""
    try:
        return [path for path in directory.iterdir() if path.name.startswith(".step_") and not is_pinned(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def fold(run: RunDir, *, signs_of_life: bool = False) -> None:
    """Keep the ledger, the metrics and the last attempt's folder of a trial that has ended.

    Args:
        signs_of_life: keep the last attempt's heartbeats and stacks too.
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
    """Remove a folder, or all but one file of it where it has that."""
    if not (folder / keep).exists():
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != keep:
            path.unlink(missing_ok=True)
