from __future__ import annotations

import itertools
import math
import random
from typing import Any

import optuna
import pytest

from hpcaccel.spec.sweep.points import applies, contains
from hpcaccel.sweeps.space import Space
from tests.sweeps.making import made

EVERY: dict[str, Any] = {
    "args.f": {"float": [-1, 3]},
    "args.log": {"float": [1e-4, 1e-1], "log": True},
    "args.step": {"float": [0, 1], "step": 0.1},
    "args.i": {"int": [1, 9], "step": 2},
    "args.ilog": {"int": [1, 1000], "log": True},
    "args.c": {"choice": ["adam", "sgd", None]},
    "args.m": {"choice": [1, True, [0.9, 0.95]], "when": {"args.c": "sgd"}},
    "args.n": {"choice": ["1", "true"], "when": {"args.m": [[0.9, 0.95]]}},
}


@pytest.fixture(scope="module")
def space() -> Space:
    return Space(made(EVERY, max_trials=1).sweep.parameters)


def a_trial(fixed: dict[str, Any] | None = None, seed: int = 0) -> optuna.trial.Trial:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    if fixed is not None:
        study.enqueue_trial(fixed)
    return study.ask()


def lies_in(space: Space, point: dict[str, Any]) -> bool:
    return space.is_whole(point) and all(
        contains(space.parameters[name], value) and applies(space.parameters[name], point)
        for name, value in point.items()
    )


def test_only_parameters_whose_condition_holds_are_suggested(space: Space) -> None:
    chosen = [space.suggest(a_trial(seed=seed)) for seed in range(30)]
    assert all(lies_in(space, point) for point in chosen)
    assert all(("args.m" in point) == (point["args.c"] == "sgd") for point in chosen)
    assert any("args.n" in point for point in chosen)


def test_point_survives_the_storage_round_trip(space: Space) -> None:
    every = {"args.f": 0.5, "args.log": 1e-3, "args.step": 0.3, "args.i": 3, "args.ilog": 7, "args.c": "sgd"}
    for choice in (1, True):
        point = {**every, "args.m": choice}
        back = space.suggest(a_trial(space.stored(point)))
        assert back == point
        assert back["args.m"] is choice
    point = {**every, "args.m": [0.9, 0.95], "args.n": "true"}
    assert space.suggest(a_trial(space.stored(point))) == point
    assert space.point(space.stored(point)) == point


def test_trial_with_stored_values_keeps_them(space: Space) -> None:
    trial = a_trial({"args.c": "adam"})
    first = space.suggest(trial)
    assert first["args.c"] == "adam"
    assert space.suggest(optuna.trial.Trial(trial.study, trial._trial_id)) == first


def test_unit_cube_maps_onto_the_whole_space(space: Space) -> None:
    source = random.Random(1)
    points = [space.at([source.random() for _ in EVERY], {}) for _ in range(300)]
    assert all(lies_in(space, point) for point in points)
    assert {point["args.step"] for point in points} == {round(0.1 * step, 1) for step in range(11)}
    assert {point["args.i"] for point in points} == {1, 3, 5, 7, 9}
    assert 80 < sum(point["args.log"] < 1e-3 for point in points) < 120
    assert 70 < sum(point["args.ilog"] < 10 for point in points) < 130
    ends = [space.at([corner] * len(EVERY), {}) for corner in (0.0, 1 - 2**-53)]
    assert [point["args.ilog"] for point in ends] == [1, 1000]
    assert math.isclose(ends[1]["args.log"], 0.1)


def test_fixed_values_are_used_where_they_apply(space: Space) -> None:
    fixed = {"args.i": 5, "args.m": True}
    for corner in (0.1, 0.5):
        point = space.at([corner] * len(EVERY), fixed)
        assert point["args.i"] == 5
        assert ("args.m" in point) == (point["args.c"] == "sgd")


def test_value_near_a_step_is_rounded_to_it(space: Space) -> None:
    assert space.near("args.step", 0.1 + 0.2) == 0.3
    assert space.near("args.f", 1) == 1.0


def test_distributions_survive_optunas_json_round_trip() -> None:
    spec = made({f"args.{index}": item for index, item in enumerate(itertools.islice(EVERY.values(), 6))})
    space = Space(spec.sweep.parameters)
    for name, distribution in space.distributions.items():
        text = optuna.distributions.distribution_to_json(distribution)
        assert optuna.distributions.json_to_distribution(text) == distribution, name
