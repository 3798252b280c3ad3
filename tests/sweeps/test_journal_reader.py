"""The journal reader, which does not use Optuna, gives the same study as Optuna."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.sweeps.journal_reader import StudyRecord, read_study

optuna = pytest.importorskip("optuna")

from hpcaccel.sweeps.journal import Journal  # noqa: E402  (needs optuna)

STATES = {"RUNNING": "running", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "WAITING": "waiting"}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(level)


def make(path: Path, *, metrics: int = 1) -> Any:
    """A study with every kind of operation."""
    journal = Journal(path)
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(journal),
        study_name="s",
        directions=["minimize"] + ["maximize"] * (metrics - 1),
        sampler=optuna.samplers.RandomSampler(seed=1),
    )
    study.set_user_attr("hash", "abc")
    study.enqueue_trial({"args.lr": 0.5}, user_attrs={"why": "own values"})
    study.enqueue_trial({"args.depth": 4})
    for number in range(6):
        journal.note("claim", trial=number, worker=number % 2)
        trial = study.ask()
        trial.suggest_float("args.lr", 1e-4, 1.0, log=True)
        if number % 2:
            trial.suggest_int("args.depth", 2, 8, step=2)
        trial.suggest_categorical("runtime.mixed_precision", ["no", "bf16", None, True, 3, 2.5])
        if metrics == 1:
            trial.report(1.0 / (number + 1), 1)
            trial.report(0.5 / (number + 1), 4)
        trial.set_user_attr("gpu_seconds", 12.5)
        if number < 3:
            study.tell(trial, [float(number)] * metrics)
        elif number < 5:
            states = {3: optuna.trial.TrialState.PRUNED, 4: optuna.trial.TrialState.FAIL}
            study.tell(trial, state=states[number])
    study.enqueue_trial({"args.lr": 0.25})
    study.add_trial(
        optuna.trial.create_trial(
            values=[9.0] * metrics,
            params={"args.lr": 0.75},
            distributions={"args.lr": optuna.distributions.FloatDistribution(1e-4, 1.0, log=True)},
            intermediate_values={3: 8.0} if metrics == 1 else None,
        )
    )
    return study


def agree(study: Any, record: StudyRecord) -> None:
    trials = study.get_trials(deepcopy=False)
    assert len(record.trials) == len(trials)
    for ours, theirs in zip(record.trials, trials, strict=True):
        assert ours.state == STATES[theirs.state.name]
        fixed = theirs.system_attrs.get("fixed_params", {}) if ours.state == "waiting" else {}
        assert ours.params == {**theirs.params, **fixed}
        assert [type(value) for value in ours.params.values()] == [
            type(value) for value in {**theirs.params, **fixed}.values()
        ]
        assert (ours.number, ours.values) == (theirs.number, theirs.values)
        assert (ours.intermediate, ours.user_attrs) == (theirs.intermediate_values, theirs.user_attrs)
        assert ours.system_attrs == theirs.system_attrs
        for mine, moment in ((ours.started, theirs.datetime_start), (ours.ended, theirs.datetime_complete)):
            assert mine == (None if moment is None else pytest.approx(moment.timestamp()))


@pytest.mark.parametrize("metrics", [1, 2])
def test_reader_gives_the_same_study_as_optuna(tmp_path: Path, metrics: int) -> None:
    study = make(tmp_path / "journal.jsonl", metrics=metrics)
    record = read_study(tmp_path / "journal.jsonl")
    agree(study, record)
    assert record.name == "s"
    assert record.directions == ["minimize", "maximize"][:metrics]
    assert record.user_attrs == {"hash": "abc"}
    assert [note["trial"] for note in record.notes] == [0, 1, 2, 3, 4, 5]


def test_incremental_read_equals_a_full_read_after_every_line(tmp_path: Path) -> None:
    make(tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "journal.jsonl"
    growing = StudyRecord(path)
    for number, line in enumerate(lines):
        with path.open("ab") as file:
            file.write(line[:-9])
            file.flush()
            assert not growing.read()
            file.write(line[-9:])
            if number % 7 == 0:
                file.write(b'{"op_code":4,"wor~\n')  # a torn line, ended by the next writer
        assert growing.read()
        assert growing.trials == read_study(path).trials
    agree(
        optuna.load_study(study_name="s", storage=optuna.storages.JournalStorage(Journal(path))),
        growing,
    )


def test_operations_on_ended_or_unknown_trials_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    study = make(path)
    other = Journal(path)
    for operation in (
        {"op_code": 6, "trial_id": 0, "state": 3, "values": None, "datetime_complete": "2026-01-01T00:00:00+00:00"},
        {"op_code": 7, "trial_id": 0, "step": 9, "intermediate_value": 0.0},
        {"op_code": 8, "trial_id": 99, "user_attr": {"a": 1}},
        {"op_code": 6, "trial_id": 5, "state": 0, "values": None, "datetime_start": "2026-01-01T00:00:00+00:00"},
        {"op_code": 4, "study_id": 7, "datetime_start": "2026-01-01T00:00:00+00:00"},
    ):
        other.append_logs([{"worker_id": "somebody", **operation}])
    agree(study, read_study(path))


def test_missing_journal_is_an_empty_study(tmp_path: Path) -> None:
    assert read_study(tmp_path / "journal.jsonl").trials == []


def test_journal_reader_imports_neither_optuna_nor_pydantic() -> None:
    code = "import sys, hpcaccel.sweeps.journal_reader, hpcaccel.sweeps.results; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"optuna", "pydantic", "numpy"}.isdisjoint(loaded)
