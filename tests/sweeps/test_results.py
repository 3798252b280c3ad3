"""Ranking of a sweep's points, and the table of its trials."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace

from hpcaccel.sweeps.journal_reader import State, TrialRecord
from hpcaccel.sweeps.results import Goal, best, best_first, counts, pareto_front, ranking, rows, to_csv, to_json

LOSS = Goal.of({"metric": "loss"})


def trial(
    number: int, *values: float, state: State = "complete", point: int | None = None, step: int = 10
) -> TrialRecord:
    drawn = number if point is None else point
    marks = {} if drawn == number else {"point": drawn, "origin": "repeat"}
    told = {} if state == "running" else {"gpu_seconds": 120.0, "attempts": 2}
    return TrialRecord(
        number=number,
        state=state,
        values=list(values) or None,
        params={"args.lr": float(drawn)},
        intermediate={step: 1.0},
        started=100.0,
        ended=None if state == "running" else 160.0,
        user_attrs={**marks, **told},
    )


def numbers(trials: list[TrialRecord], goal: Goal = LOSS) -> list[int]:
    return [point.trial.number for point in ranking(trials, goal)]


def test_mode_sets_the_order_of_the_ranking() -> None:
    trials = [trial(0, 3.0), trial(1, 1.0), trial(2, 2.0)]
    assert numbers(trials) == [1, 2, 0]
    assert numbers(trials, Goal.of({"metric": "loss", "mode": "max"})) == [0, 2, 1]


def test_pruned_trials_rank_after_complete_ones() -> None:
    trials = [trial(0, 0.1, state="pruned", step=4), trial(1, 5.0), trial(2, 0.2, state="pruned", step=64)]
    assert numbers(trials) == [1, 2, 0]
    assert best_first(trials, LOSS) == [1]
    assert best(trials[:1], LOSS) is None


def test_trial_without_a_value_is_not_ranked() -> None:
    assert numbers([trial(0, state="failed"), trial(1, state="running"), trial(2, state="waiting")]) == []
    assert best([], LOSS) is None


def test_nan_value_ranks_last() -> None:
    for mode in ("min", "max"):
        goal = Goal.of({"metric": "loss", "mode": mode})
        assert numbers([trial(0, math.nan), trial(1, 2.0)], goal) == [1, 0]


def test_repeated_points_are_ranked_by_the_mean_of_their_seeds() -> None:
    goal = Goal.of({"metric": "loss", "repeat": 2})
    trials = [trial(0, 1.0), trial(1, 4.0, point=0), trial(2, 2.0), trial(3, 2.5, point=2)]
    first, second = ranking(trials, goal)
    assert (first.params, first.values, first.complete) == ({"args.lr": 2.0}, (2.25,), 2)
    assert second.values == (2.5,)
    assert second.trial.number == 0
    assert best_first(trials, goal) == [2, 3, 0, 1]


def test_point_with_an_unfinished_seed_ranks_after_complete_points() -> None:
    goal = Goal.of({"metric": "loss", "repeat": 2})
    trials = [trial(0, 0.5), trial(1, 0.4, point=0, state="pruned"), trial(2, 2.0), trial(3, 2.0, point=2)]
    assert numbers(trials, goal) == [2, 0]


def test_extended_trial_is_ranked_as_a_separate_point() -> None:
    goal = Goal.of({"metric": "loss", "repeat": 2})
    more = trial(2, 0.1, point=0)
    more.user_attrs |= {"origin": "extend", "set": ["args.epochs=20"]}
    trials = [trial(0, 1.0), trial(1, 2.0, point=0), more]
    assert [(point.values, point.complete) for point in ranking(trials, goal)] == [((1.5,), 2), ((0.1,), 1)]


def test_several_metrics_are_ranked_by_pareto_front() -> None:
    goal = Goal.of({"metric": ["loss", "accuracy"], "mode": ["min", "max"]})
    trials = [
        trial(0, 1.0, 0.5), trial(1, 2.0, 0.9), trial(2, 1.5, 0.4), trial(3, 3.0, 0.9), trial(4, 0.1, math.nan),
        trial(5, 1.0, 0.5),
    ]  # fmt: skip
    assert [point.trial.number for point in pareto_front(trials, goal)] == [0, 5, 1]
    assert numbers(trials, goal)[:3] == [0, 5, 1]
    chosen = best(trials, goal)
    assert chosen is not None
    assert chosen.trial.number == 0


def test_counts_include_every_state() -> None:
    found = counts([trial(0, 1.0), trial(1, state="running"), trial(2, 1.0)])
    assert found == {"running": 1, "complete": 2, "pruned": 0, "failed": 0, "waiting": 0}


def test_table_has_a_row_for_every_trial() -> None:
    table = rows([trial(0, 1.5), trial(1, state="running")], LOSS, workers={1: 3})
    assert table[0] == {
        "trial": 0, "state": "complete", "loss": 1.5, "args.lr": 0.0, "step": 10, "seconds": 60.0,
        "gpu_seconds": 120.0, "worker": None, "attempts": 2,
    }  # fmt: skip
    assert (table[1]["loss"], table[1]["seconds"], table[1]["worker"]) == (None, None, 3)


def test_tables_as_json_and_csv_can_be_read_back() -> None:
    trials = [trial(0, math.nan), trial(1, 2.0)]
    trials[1].params["args.sizes"] = [1, 2]
    table = rows(trials, LOSS)
    assert [row["loss"] for row in json.loads(to_json(table))] == [None, 2.0]
    head, *lines = csv.reader(io.StringIO(to_csv(table)))
    assert head == list(table[0])
    assert lines[1][head.index("args.sizes")] == "[1, 2]"
    assert lines[0][head.index("worker")] == ""


def test_metric_named_like_a_column_gets_a_prefix() -> None:
    (row,) = rows([trial(0, 7.0)], Goal.of({"metric": "seconds"}))
    assert (row["metric.seconds"], row["seconds"]) == (7.0, 60.0)


def test_step_of_a_row_is_the_step_of_its_value() -> None:
    attrs = {"gpu_seconds": 1.0, "attempts": 1, "steps": 210}
    complete = replace(trial(0, 1.0), user_attrs={**attrs, "value_step": 200})
    old = replace(trial(1, 1.0), user_attrs=attrs)
    pruned = replace(trial(2, 2.0, state="pruned", step=40), user_attrs={**attrs, "steps": 57})
    failed = replace(trial(3, state="failed", step=40), user_attrs={**attrs, "steps": 57})
    assert [row["step"] for row in rows([complete, old, pruned, failed], LOSS)] == [200, 210, 40, 57]
