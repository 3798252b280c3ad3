"""Reads the trials in a sweep's journal without Optuna, because views must start in milliseconds.

The operations are replayed as in ``optuna.storages.JournalStorage``: an operation on a trial that does not exist or has
finished has no effect. Many lines are decoded at a time, which takes half as long as decoding them one by one.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from hpcaccel.sweeps.journal_file import JournalFile

__all__ = ["State", "StudyRecord", "TrialRecord", "read_study"]

State = Literal["running", "complete", "pruned", "failed", "waiting"]
"""State of a trial. A ``waiting`` trial is enqueued and has not started."""

STATES: tuple[State, ...] = ("running", "complete", "pruned", "failed", "waiting")
"""All states, in the order of Optuna's numbers for them."""

(
    CREATE_STUDY, DELETE_STUDY, STUDY_USER_ATTR, STUDY_SYSTEM_ATTR, CREATE_TRIAL, PARAM, STATE_VALUES, INTERMEDIATE,
    USER_ATTR, SYSTEM_ATTR,
) = range(10)  # fmt: skip
"""Optuna's numbers for its operations, see ``optuna.storages.journal._storage.JournalOperation``."""


@dataclass(slots=True, kw_only=True)
class TrialRecord:
    """A trial in the journal. Times are seconds since the epoch."""

    number: int
    state: State
    params: dict[str, Any] = field(default_factory=dict)
    """The value of each parameter, by path in the spec; for a waiting trial, only the fixed values."""
    values: list[float] | None = None
    """One value per metric, in the sweep's order."""
    intermediate: dict[int, float] = field(default_factory=dict)
    """The values reported to the pruner, by step. A pruned trial that reported none has only its last value."""
    user_attrs: dict[str, Any] = field(default_factory=dict)
    system_attrs: dict[str, Any] = field(default_factory=dict)
    """Optuna's own attributes, for instance the sampler's."""
    started: float | None = None
    ended: float | None = None

    @property
    def is_finished(self) -> bool:
        return self.state in ("complete", "pruned", "failed")

    @property
    def step(self) -> int | None:
        """The last step that has a value in the journal; None if no step has one."""
        return max(self.intermediate, default=None)


class StudyRecord:
    """A journal's study, updated by ``read``. If the journal has several studies, only the first one is read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = JournalFile(path)
        self.offset = 0
        self.name = ""
        self.directions: list[Literal["minimize", "maximize"]] = []
        self.user_attrs: dict[str, Any] = {}
        self.system_attrs: dict[str, Any] = {}
        self.trials: list[TrialRecord] = []
        """All trials, ordered by number."""
        self.notes: list[dict[str, Any]] = []
        """hpcaccel's lines, ``{"hpcaccel": kind, …}``, in file order."""
        self._by_id: list[TrialRecord | None] = []
        self._studies: list[str] = []
        self._external: dict[str, Callable[[float], Any]] = {}

    def read(self) -> bool:
        """Read the lines added since the last call. Returns whether there were any.

        Raises:
            RunDirectoryError: the journal exists but cannot be read.
        """
        before = self.offset
        with _without_collecting():
            for behind, data in self.file.pieces(self.offset):
                self._take(_decoded(data))
                self.offset = behind - _bad_tail(data)
        return self.offset != before

    def _take(self, lines: list[Any]) -> None:
        by_id = self._by_id
        for line in lines:
            operation = line.get("op_code")
            if operation is None:
                if "hpcaccel" in line:
                    self.notes.append(line)
            elif operation < CREATE_TRIAL:
                self._take_study(operation, line)
            elif operation == CREATE_TRIAL:
                self._create(line)
            elif operation <= SYSTEM_ATTR and line["trial_id"] < len(by_id):
                trial = by_id[line["trial_id"]]
                if trial is not None and trial.state in ("running", "waiting"):
                    self._change(trial, operation, line)

    def _change(self, trial: TrialRecord, operation: int, line: dict[str, Any]) -> None:
        if operation == PARAM:
            distribution = line["distribution"]
            external = self._external.get(distribution) or self._decoder(distribution)
            trial.params[line["param_name"]] = external(line["param_value_internal"])
        elif operation == INTERMEDIATE:
            trial.intermediate[line["step"]] = line["intermediate_value"]
        elif operation == USER_ATTR:
            trial.user_attrs.update(line["user_attr"])
        elif operation == SYSTEM_ATTR:
            trial.system_attrs.update(line["system_attr"])
            if trial.state == "waiting":
                trial.params.update(line["system_attr"].get("fixed_params", {}))
        else:
            _change_state(trial, line)

    def _create(self, line: dict[str, Any]) -> None:
        if line["study_id"] != 0 or not self._studies:
            if line["study_id"] < len(self._studies):
                self._by_id.append(None)  # in another study: Optuna counts trial ids across all studies
            return
        trial = TrialRecord(number=len(self.trials), state=STATES[line.get("state", 0)])
        trial.started = _seconds(line["datetime_start"])
        if "state" in line:
            self._fill(trial, line)
        self.trials.append(trial)
        self._by_id.append(trial)

    def _fill(self, trial: TrialRecord, line: dict[str, Any]) -> None:
        """Set the values of a trial that was created with values: it was enqueued, or added with its result."""
        distributions = line.get("distributions", {})
        for name, value in line.get("params", {}).items():
            trial.params[name] = self._decoder(distributions[name])(value)
        trial.user_attrs = line.get("user_attrs", {})
        trial.system_attrs = line.get("system_attrs", {})
        trial.intermediate = {int(step): value for step, value in line.get("intermediate_values", {}).items()}
        value, trial.values = line.get("value"), line.get("values")
        if value is not None:
            trial.values = [value]
        if trial.state == "waiting":
            trial.params.update(trial.system_attrs.get("fixed_params", {}))
        trial.ended = _seconds(line.get("datetime_complete"))

    def _take_study(self, operation: int, line: dict[str, Any]) -> None:
        if operation == CREATE_STUDY:
            if line["study_name"] not in self._studies:
                self._studies.append(line["study_name"])
                if len(self._studies) == 1:
                    self.name = line["study_name"]
                    self.directions = ["maximize" if number == 2 else "minimize" for number in line["directions"]]
        elif line["study_id"] == 0 and operation == STUDY_USER_ATTR:
            self.user_attrs.update(line["user_attr"])
        elif line["study_id"] == 0 and operation == STUDY_SYSTEM_ATTR:
            self.system_attrs.update(line["system_attr"])

    def _decoder(self, distribution: str) -> Callable[[float], Any]:
        """Function that maps the number stored by Optuna to the chosen value."""
        described = json.loads(distribution)
        kind, choices = described.get("name", ""), described.get("attributes", {}).get("choices")
        if choices is not None:
            self._external[distribution] = lambda value: choices[int(value)]
        else:
            self._external[distribution] = int if kind.startswith("Int") else float
        return self._external[distribution]


def read_study(path: str | os.PathLike[str]) -> StudyRecord:
    """The study of the journal at ``path``; an empty one if the file does not exist yet.

    Raises:
        RunDirectoryError: the journal exists but cannot be read.
    """
    study = StudyRecord(path)
    study.read()
    return study


def _change_state(trial: TrialRecord, line: dict[str, Any]) -> None:
    state = STATES[line["state"]]
    if state == "running":
        if trial.state == "running":
            return  # two processes tried to take a waiting trial, and the one that wrote this line was second
        if trial.started is None:
            trial.params = {}  # from here on, operations set the fixed values one by one, like all other values
        trial.started = _seconds(line["datetime_start"])
    elif state != "waiting":
        trial.ended = _seconds(line["datetime_complete"])
    trial.state = state
    if line["values"] is not None:
        trial.values = line["values"]


def _seconds(moment: str | None) -> float | None:
    return None if moment is None else datetime.fromisoformat(moment).timestamp()


def _decoded(data: bytes) -> list[Any]:
    """The JSON objects in ``data``. If one of its lines is invalid, the lines are decoded one by one."""
    try:
        values = json.loads(b"[" + data[:-1].replace(b"\n", b",") + b"]")
    except ValueError:
        values = [_value(line) for line in data.split(b"\n")]
    return [value for value in values if type(value) is dict]


def _value(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _bad_tail(data: bytes) -> int:
    """Length in bytes of the last line if it is not a JSON object, else 0. NFS may show a line before it is complete,
    so such a line is read again."""
    last = data[data.rfind(b"\n", 0, -1) + 1 :]
    return 0 if isinstance(_value(last), dict) else len(last)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Disable garbage collection: reading creates no reference cycles, and scanning all records takes a long time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
