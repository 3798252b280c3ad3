from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.trial import TrialState

from hpcaccel.errors import UserError
from hpcaccel.spec import SweepSpec
from hpcaccel.sweeps.journal import Journal
from hpcaccel.sweeps.journal_notes import is_surplus, point_number
from hpcaccel.sweeps.study import AskedTrial, NoMore, SweepStudy
from tests.sweeps.making import LR, SMALL, made

MIXED: dict[str, Any] = {"args.lr": LR, "args.depth": {"int": [2, 8]}, "args.o": {"choice": ["a", "b"]}}
CONDITIONAL: dict[str, Any] = {
    "args.o": {"choice": ["adam", "sgd"]},
    "args.m": {"float": [0, 1], "when": {"args.o": "sgd"}},
    **MIXED,
} | {"args.o": {"choice": ["adam", "sgd"]}}


def study(spec: SweepSpec, storage: BaseStorage | None = None) -> SweepStudy:
    return SweepStudy(spec, storage or InMemoryStorage())


def loss(point: dict[str, Any]) -> float:
    return (math.log10(point["args.lr"]) + 2) ** 2 + abs(point.get("args.depth", 5) - 5)


def drawn(one: SweepStudy) -> AskedTrial:
    asked = one.ask()
    assert isinstance(asked, AskedTrial)
    return asked


def run(one: SweepStudy) -> list[AskedTrial]:
    """Run all trials one after another."""
    found = []
    while isinstance(asked := one.ask(), AskedTrial):
        one.complete(asked.number, [loss(asked.point)] * len(one.spec.sweep.metrics))
        found.append(asked)
    return found


def points(asked: list[AskedTrial]) -> list[tuple[Any, ...]]:
    return [tuple(one.point.values()) for one in asked]


# -- drawing trials -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        *((method, MIXED) for method in ("random", "tpe", "cmaes", "qmc")),
        *((method, CONDITIONAL) for method in ("random", "tpe", "qmc")),
    ],
)
def test_the_same_seed_gives_the_same_trials(method: str, parameters: dict[str, Any]) -> None:
    first, again = (run(study(made(parameters, method=method, seed=3))) for _ in range(2))
    assert len(first) == 20
    assert points(first) == points(again)
    assert len(set(points(first))) == 20
    assert points(first) != points(run(study(made(parameters, method=method, seed=4))))


@pytest.mark.torch
def test_gp_method_continues_after_its_random_trials() -> None:
    pytest.importorskip("torch")
    assert len(run(study(made(method="gp", max_trials=11)))) == 11  # the first ten are random


def test_own_values_of_the_spec_come_first_then_enqueued_points() -> None:
    whole = {"args.lr": 1e-3, "args.depth": 4, "args.o": "b"}
    spec = made(MIXED, args={"lr": 0.02}, enqueue=[{"args.depth": 3}, whole])
    one = study(spec)
    first, second, third, fourth = (drawn(one) for _ in range(4))
    assert first.point["args.lr"] == 0.02
    assert second.point["args.depth"] == 3
    assert second.point["args.lr"] != 0.02
    assert third.point == whole
    assert fourth.point not in (first.point, second.point, third.point)
    args: Any = first.job(spec).entrypoint.args
    assert args["lr"] == 0.02


def test_concurrent_workers_draw_different_points(tmp_path: Path) -> None:
    spec = made(MIXED, method="tpe", max_trials=40)
    workers = [study(spec, JournalStorage(Journal(tmp_path / "journal.jsonl"))) for _ in range(4)]
    found: list[AskedTrial] = []
    for _ in range(10):
        flying = [drawn(worker) for worker in workers]
        for worker, asked in zip(workers, flying, strict=True):
            worker.complete(asked.number, [loss(asked.point)])
        found += flying
    assert sorted(asked.number for asked in found) == list(range(40))
    assert len(set(points(found))) == 40
    assert all(isinstance(worker.ask(), NoMore) for worker in workers)


@pytest.mark.parametrize("method", ["grid", "random", "tpe", "qmc"])
def test_every_point_of_a_small_space_is_tried_once(method: str) -> None:
    one = study(made(SMALL, method=method, max_trials=None, max_gpu_hours=1, args={"lr": 2}))
    found = run(one)
    assert len(found) == len(set(points(found))) == 6
    assert found[0].point["args.lr"] == 2
    assert one.ask() == NoMore(why="all 6 points of the search space have been tried")


def test_grid_continues_in_order_after_own_and_enqueued_points() -> None:
    spec = made(SMALL, method="grid", args={"lr": 2, "depth": 3}, enqueue=[{"args.depth": 4}])
    assert points(run(study(spec))) == [(2, 3), (1, 4), (1, 2), (1, 3), (2, 2), (2, 4)]


def test_the_grid_stops_at_max_trials() -> None:
    one = study(made(SMALL, method="grid", max_trials=4))
    assert points(run(one)) == [(1, 2), (1, 3), (1, 4), (2, 2)]
    assert one.ask() == NoMore(why="all trials that max_trials (4) allows have been started")


def test_trial_started_beyond_max_trials_is_marked_surplus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers see that one more trial may start, and both start it."""
    storage = InMemoryStorage()
    first, second = (study(made(max_trials=3), storage) for _ in range(2))
    for _ in range(2):
        drawn(first)
    monkeypatch.setattr(second, "_ends", lambda trials: "")
    assert drawn(first).number == 2
    assert second.ask() == NoMore(why="all trials that max_trials (3) allows have been started")
    assert [is_surplus(trial.user_attrs) for trial in first.trials()] == [False, False, False, True]
    assert first.trials()[3].state == TrialState.FAIL


def test_duplicate_of_a_concurrently_drawn_point_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = study(made({"args.a": {"choice": [1, 2]}}, method="tpe"))
    drawn(one)
    kept = one.drawing._draw
    monkeypatch.setattr(one.drawing, "_draw", lambda *_: one.drawing.space.point(one.trials()[0].params))
    one.study.sampler = one.drawing
    calls = []
    is_double = one._is_double

    def noticed(*arguments: Any) -> bool:
        found = is_double(*arguments)
        calls.append(found)
        monkeypatch.setattr(one.drawing, "_draw", kept)
        return found

    monkeypatch.setattr(one, "_is_double", noticed)
    third = drawn(one)
    assert calls == [True, False]
    assert third.number == 2
    assert third.point != one.drawing.space.point(one.trials()[0].params)


def test_trial_whose_worker_died_while_drawing_still_gets_its_point() -> None:
    spec = made(SMALL, method="grid")
    one = study(spec)
    drawn(one)
    one.study.ask()  # and the worker dies
    assert points([drawn(one)]) == [(1, 4)]
    assert points([one.again(1)]) == [(1, 3)]
    assert one.again(1) == one.again(1)


# -- seeds and retries ----------------------------------------------------------------------------------------------


def test_every_point_is_tried_with_each_seed() -> None:
    found = run(study(made(max_trials=7, repeat=3, seed=10)))
    assert [one.number for one in found] == list(range(6))
    assert [(one.repeat, one.seed) for one in found] == [(0, 10), (1, 11), (2, 12)] * 2
    assert points(found[:3]) == points(found[:1]) * 3
    assert points(found[3:]) == points(found[3:4]) * 3
    assert found[1].job(made(repeat=3)).runtime.seed == 11


def test_seeds_that_a_dead_worker_did_not_enqueue_are_enqueued() -> None:
    one = study(made(repeat=3, max_trials=3))
    trial = one.study.ask()
    one.drawing.space.suggest(trial)  # and the worker dies
    assert one.again(0).repeat == 0
    one.again(0)
    assert [found.number for found in run(one)] == [1, 2]


def test_retried_trial_is_a_new_trial_with_the_same_point_and_seed() -> None:
    one = study(made(max_trials=2, repeat=2))
    first, second = drawn(one), drawn(one)
    one.fail(second.number)
    one.enqueue(second.number, origin="retry")
    again = drawn(one)
    assert (again.point, again.seed, again.number) == (second.point, second.seed, 2)
    assert point_number(2, one.trials()[2].user_attrs) == first.number
    assert isinstance(one.ask(), NoMore)


# -- pruning and results --------------------------------------------------------------------------------------------


def test_worse_trial_is_pruned_at_a_rung_and_only_rungs_are_stored() -> None:
    one = study(made(pruner={"asha": {"min_steps": 2, "reduction_factor": 2}}))
    why = ""
    for value in (1.0, 2.0, 3.0, 4.0):
        number = drawn(one).number
        for step in range(1, 6):
            if one.wants(number, step):
                why = one.report(number, step, value)
        if why:
            one.prune(number)
        else:
            one.complete(number, [value])
    assert one.trials()[0].intermediate_values == {2: 1.0, 4: 1.0}
    assert [trial.state.name for trial in one.trials()] == ["COMPLETE", "PRUNED", "PRUNED", "PRUNED"]
    assert one.trials()[3].value == 4.0
    assert why == "at step 4 it was ranked 4 of 4, and only the best 2 continue"


def test_pruning_verdict_is_visible_to_other_workers() -> None:
    storage = InMemoryStorage()
    spec = made(pruner={"asha": {"min_steps": 1, "reduction_factor": 2}})
    one = study(spec, storage)
    for value in (1.0, 2.0):
        why = one.report(drawn(one).number, 1, value)
    other = study(spec, storage)
    assert other.verdict(1) == why != ""
    assert not other.wants(1, 1)
    assert other.wants(1, 2)


def test_study_with_several_metrics_runs_without_pruning() -> None:
    spec = made(MIXED, metric=["loss", "speed"], mode=["min", "max"], max_trials=15)
    one = study(spec)
    assert len(run(one)) == 15
    assert one.study.directions == [optuna.study.StudyDirection.MINIMIZE, optuna.study.StudyDirection.MAXIMIZE]
    assert one.verdict(0) == ""


def test_sampler_learns_from_pruned_trials() -> None:
    one = study(made(MIXED, method="tpe", pruner={"asha": {"min_steps": 1}}, max_trials=30))
    while isinstance(asked := one.ask(), AskedTrial):
        if one.report(asked.number, 1, loss(asked.point)):
            one.prune(asked.number)
        else:
            one.complete(asked.number, [loss(asked.point)])
    late = [loss(one.drawing.space.point(trial.params)) for trial in one.trials()[15:]]
    early = [loss(one.drawing.space.point(trial.params)) for trial in one.trials()[:10]]
    assert sum(late) / len(late) < sum(early) / len(early)


# -- errors ---------------------------------------------------------------------------------------------------------


def test_study_started_with_another_mode_is_refused() -> None:
    storage = InMemoryStorage()
    study(made(), storage)
    with pytest.raises(UserError, match=r"this sweep was started with the modes \(min\), not \(max\)"):
        study(made(mode="max"), storage)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("cmaes", r"needs packages .* \(optuna, cmaes\): pip install 'hpcaccel\[sweep\]'"),
        ("gp", r"needs packages .* \(optuna, scipy, torch\): pip install 'hpcaccel\[sweep,train\]'"),
    ],
)
def test_missing_package_error_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, method: str, message: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=message):
        study(made(MIXED, method=method))
