"""``sweep export``: the database that Optuna opens has everything that the sweep's journal has."""

from __future__ import annotations

import json
import sqlite3
import warnings
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.trial import TrialState

from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import UserError
from hpcaccel.sweeps.journal import Journal
from hpcaccel.sweeps.study import STUDY_NAME
from hpcaccel.sweeps.sweep_handle import Sweep
from tests.sweeps.sweeping import Place, Trials


@pytest.fixture
def sweep(place: Place) -> Sweep:
    return place.start()[0]


def loaded(file: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optuna.load_study(study_name=None, storage=f"sqlite:///{file}")


def everything(trial: optuna.trial.FrozenTrial) -> tuple[Any, ...]:
    return (
        trial.number, trial.state, trial.values, trial.params, trial.distributions, trial.intermediate_values,
        trial.user_attrs, trial.system_attrs, trial.datetime_start, trial.datetime_complete,
    )  # fmt: skip


def content(folder: SweepDir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.path.glob("*")) if path.is_file()}


def test_copy_of_a_running_sweep_has_all_that_its_journal_has(sweep: Sweep, tmp_path: Path) -> None:
    trials = Trials(sweep.dir)
    trials.complete(0.25)
    trials.fail()
    pruned = trials.begin()
    for step, value in ((1, 0.5), (3, 0.4)):
        trials.study.study._storage.set_trial_intermediate_value(trials.study._trial_id(pruned), step, value)
    trials.study.prune(pruned)
    trials.begin()
    before = content(sweep.dir)
    file, count = sweep.export(tmp_path / "study.db")
    assert (file, count) == (tmp_path / "study.db", 4)
    assert content(sweep.dir) == before, "the sweep is only read"
    original = optuna.load_study(study_name=STUDY_NAME, storage=JournalStorage(Journal(sweep.dir.journal)))
    study = loaded(file)
    assert [everything(one) for one in study.trials] == [everything(one) for one in original.trials]
    assert [one.state for one in study.trials] == [
        TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED, TrialState.RUNNING,
    ]  # fmt: skip
    assert (study.study_name, study.directions, study.metric_names) == ("demo", original.directions, ["loss"])
    assert (study.best_trial.number, study.best_value) == (0, 0.25)
    assert study.user_attrs["sweep"] == sweep.run_id
    assert [path.name for path in tmp_path.glob("*study.db*")] == ["study.db"], "nothing is left beside it"


def test_optuna_dashboard_shows_the_trials_and_the_best_one(sweep: Sweep, tmp_path: Path) -> None:
    from optuna_dashboard import wsgi

    trials = Trials(sweep.dir)
    for value in (0.5, 0.25, 1.0):
        trials.complete(value)
    trials.fail()
    file, _ = sweep.export(tmp_path / "study.db")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        page = wsgi(f"sqlite:///{file}")

        def get(path: str) -> Any:
            answers: list[str] = []
            environ: dict[str, Any] = {}
            setup_testing_defaults(environ)
            environ["PATH_INFO"] = path
            body = b"".join(page(environ, lambda status, headers, *_: answers.append(status) or len))
            assert answers == ["200 OK"], body
            return json.loads(body)

        [study] = get("/api/studies")["study_summaries"]
        shown = get(f"/api/studies/{study['study_id']}")
    assert study["study_name"] == "demo"
    assert [one["state"] for one in shown["trials"]] == ["Complete"] * 3 + ["Fail"]
    assert [one["values"] for one in shown["trials"][:3]] == [[0.5], [0.25], [1.0]]
    assert [one["number"] for one in shown["best_trials"]] == [1]


def test_existing_file_is_replaced_only_with_force(sweep: Sweep, tmp_path: Path) -> None:
    Trials(sweep.dir).complete(1.0)
    file, _ = sweep.export(tmp_path / "study.db")
    old = file.read_bytes()
    with pytest.raises(UserError, match="exists already: choose another --out, or replace it with --force"):
        sweep.export(file)
    assert file.read_bytes() == old
    Trials(sweep.dir).complete(0.5)
    assert sweep.export(file, force=True) == (file, 2)
    assert loaded(file).best_value == 0.5


def test_database_that_another_program_writes_to_is_not_replaced(sweep: Sweep, tmp_path: Path) -> None:
    """SQLite would apply the journal that is beside the old database to the new one."""
    Trials(sweep.dir).complete(1.0)
    file, _ = sweep.export(tmp_path / "study.db")
    with sqlite3.connect(file, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE studies SET study_name = 'mine'")
        with pytest.raises(UserError, match=r"another program, .* is writing to study\.db"):
            sweep.export(file, force=True)
        other.execute("ROLLBACK")
    other.close()
    assert loaded(file).study_name == "demo"


def test_sweep_without_a_trial_and_unusable_targets_are_refused(sweep: Sweep, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no trial yet"):
        sweep.export(tmp_path / "study.db")
    assert not (tmp_path / "study.db").exists()
    with pytest.raises(UserError, match="does not exist: create it"):
        sweep.export(tmp_path / "no" / "study.db")
    with pytest.raises(UserError, match="is a directory"):
        sweep.export(tmp_path)
