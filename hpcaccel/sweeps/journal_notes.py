"""hpcaccel's own data in a sweep's journal: user attributes of trials, and lines that are hidden from Optuna.

A drawn trial is one whose point was chosen by the search method. All other trials reuse the point of an existing trial:
they run it with a further seed, or continue an ended trial.

Workers own trials through claims, which are lines with an epoch. A worker writes a ``claim`` with the epoch after the
newest one and reads which claim of that epoch came first: all workers read the same order, so exactly one owns the
trial. A worker that was considered dead reads a higher epoch than its own and abandons the trial. (The trial's lease
and its newer attempt prevent the former owner's ranks from writing.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcaccel.core.records import from_dict
from hpcaccel.sweeps.journal_reader import StudyRecord

__all__ = [
    "ATTEMPTS", "BUDGET", "CHECKPOINT", "DETAIL", "DIVERGED", "ERROR_CLASS", "FROM", "GPU_SECONDS", "METRIC", "ORIGIN",
    "POINT", "REPEAT", "SETTINGS", "STEPS", "SURPLUS", "VALUE_STEP", "OwnershipNotes", "TrialClaim", "is_drawn",
    "is_extended", "is_surplus", "point_number", "repeat_number",
]  # fmt: skip

# -- user attributes: where a trial's point comes from ----------------------------------------------------------------

POINT = "point"
"""Number of the trial for which the point was drawn; not set for that trial itself."""

REPEAT = "repeat"
"""Index of the trial among those of its point, from 0; it determines the seed."""

ORIGIN = "origin"
"""Why a trial was created without a draw: ``repeat``, ``retry``, ``extend`` or ``budget``. Unset in drawn trials."""

SURPLUS = "surplus"
"""Why a drawn trial was discarded. Such a trial never ran, and is neither counted nor shown."""

FROM = "from"
"""Number of the ended trial that the trial continues; not set for other trials."""

CHECKPOINT = "checkpoint"
"""The checkpoint that the trial starts from: a path relative to the sweep's directory; not set if there was none."""

SETTINGS = "set"
"""The trial's own settings in addition to the point, such as ``["args.epochs=20"]``."""

# -- user attributes: how a trial ended -------------------------------------------------------------------------------

GPU_SECONDS, STEPS, ATTEMPTS = "gpu_seconds", "steps", "attempts"
"""Cost of the trial, the largest step that it logged and its number of attempts, written when it ends."""

VALUE_STEP = "value_step"
"""The step of the first metric's final value."""

ERROR_CLASS, DETAIL = "error_class", "detail"
"""Why a trial failed or was pruned: an error class, such as those below or in docs/failures.md, and a message."""

METRIC = "metric"
"""Error class: the trial completed without having logged all of the sweep's metrics."""

DIVERGED = "diverged"
"""Error class: the last value of a metric is not finite."""

BUDGET = "budget"
"""Error class: stopped because the sweep's budget was used up. Such a trial can continue."""


def point_number(number: int, user_attrs: Mapping[str, Any]) -> int:
    """Number of the trial for which the trial's point was drawn; the same for all trials of a point."""
    return int(user_attrs.get(POINT, number))


def repeat_number(user_attrs: Mapping[str, Any]) -> int:
    """Index of the trial among the trials of its point, from 0."""
    return int(user_attrs.get(REPEAT, 0))


def is_surplus(user_attrs: Mapping[str, Any]) -> bool:
    """Whether the trial was discarded before it ran."""
    return SURPLUS in user_attrs


def is_extended(user_attrs: Mapping[str, Any]) -> bool:
    """Whether the trial was created by ``sweep extend``, or continues such a trial. The pruner does not stop it."""
    return user_attrs.get(ORIGIN) == "extend"


def is_drawn(user_attrs: Mapping[str, Any]) -> bool:
    """Whether the search method drew a point for this trial, and the trial was not discarded."""
    return ORIGIN not in user_attrs and SURPLUS not in user_attrs


@dataclass(frozen=True, kw_only=True)
class TrialClaim:
    """A worker's claim on a trial. ``time`` is in seconds since 1970."""

    trial: int
    worker: int
    epoch: int
    token: str = ""
    """Identifies the tuner process that wrote the claim."""
    time: float = 0.0


class OwnershipNotes:
    """hpcaccel's lines in a sweep's journal: the owner of each trial, and whether the sweep has stopped itself."""

    def __init__(self, study: StudyRecord) -> None:
        self._study = study
        self._taken = 0
        self.claims: dict[int, TrialClaim] = {}
        """The valid claim on each trial."""
        self.halted = ""
        """Why the sweep has stopped itself; empty if it has not, or if it has been resumed since."""
        self.resumed = 0.0
        """When the sweep was last resumed, in seconds since 1970; 0.0 if it never was."""

    def read(self) -> OwnershipNotes:
        """Read new lines of the journal."""
        self._study.read()
        for note in self._study.notes[self._taken :]:
            self._take(note)
        self._taken = len(self._study.notes)
        return self

    def _take(self, note: dict[str, Any]) -> None:
        match note["hpcaccel"]:
            case "claim":
                claim = from_dict(TrialClaim, note)
                if claim.epoch == self.epoch(claim.trial) + 1:
                    self.claims[claim.trial] = claim
            case "halt":
                self.halted = str(note["why"])
            case "resume":
                self.halted, self.resumed = "", float(note.get("time", 0.0))

    def epoch(self, trial: int) -> int:
        """Epoch of the valid claim; 0 if the trial is not claimed."""
        return self.claims[trial].epoch if trial in self.claims else 0

    def owner(self, trial: int) -> int | None:
        """The worker that owns the trial; None if it is not claimed."""
        return self.claims[trial].worker if trial in self.claims else None
