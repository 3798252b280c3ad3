from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from hpcaccel.spec.sweep.pruners import Pruner
from hpcaccel.sweeps.pruning import Curve, Rule, rule_of
from tests.sweeps.making import made


def rule(pruner: Any, mode: str = "min") -> Rule:
    found = rule_of(made(pruner=pruner, mode=mode).sweep)
    assert found is not None
    return found


def curves(*values: float, step: int = 1, complete: bool = False) -> list[Curve]:
    return [Curve(number=100 + index, values={step: value}, complete=complete) for index, value in enumerate(values)]


def verdict(rule: Rule, value: float, others: list[Curve], step: int = 1) -> str:
    return rule.verdict(Curve(number=0, values={step: value}), others)


def first_rungs(rule: Rule, number: int = 0) -> list[int]:
    return list(itertools.islice(rule.rungs(number), 5))


def test_sweep_without_a_pruner_has_no_rule() -> None:
    assert rule_of(made().sweep) is None


@pytest.mark.parametrize(
    ("pruner", "steps"),
    [
        ("asha", [1, 4, 16, 64, 256]),
        ({"asha": {"min_steps": 100}}, [100, 400, 1600, 6400, 25600]),
        ({"asha": {"min_steps": 1, "max_steps": 27, "reduction_factor": 3}}, [1, 3, 9]),
        ({"asha": {"max_steps": 1000}}, [63, 252]),
        ("median", [1, 2, 4, 8, 16]),
        ({"median": {"warmup_steps": 10, "interval_steps": 5}}, [10, 15, 20, 25, 30]),
    ],
)
def test_rungs_follow_the_pruner_settings(pruner: Any, steps: list[int]) -> None:
    assert first_rungs(rule(pruner)) == steps


def test_each_rung_is_checked_once_however_often_the_program_logs() -> None:
    asha = rule({"asha": {"min_steps": 4}})
    looked: list[int] = []
    for step in [0, 1, 3, *range(5, 80, 5)]:
        if asha.wants(0, step, after=looked[-1] if looked else 0):
            looked.append(step)
    assert looked == [5, 20, 65]  # rungs 4, 16 and 64


def test_asha_continues_only_the_best_trials_of_a_rung() -> None:
    asha = rule({"asha": {"min_steps": 1, "reduction_factor": 2}})
    others = curves(1.0, 2.0, 3.0)
    assert verdict(asha, 0.5, others) == ""
    assert verdict(asha, 1.5, others) == ""
    assert verdict(asha, 2.5, others) == "at step 1 it was ranked 3 of 4, and only the best 2 continue"
    assert verdict(rule({"asha": {"min_steps": 1, "reduction_factor": 2}}, "max"), 2.5, others) == ""


def test_asha_continues_every_trial_while_a_rung_has_too_few() -> None:
    asha = rule({"asha": {"min_steps": 1}})
    assert verdict(asha, 9.0, curves(1.0, 2.0)) == ""
    assert verdict(asha, 9.0, curves(1.0, 2.0, 3.0)) != ""


def test_trials_that_have_not_reached_the_rung_do_not_count() -> None:
    asha = rule({"asha": {"min_steps": 1}})
    assert verdict(asha, 9.0, [*curves(1.0, 2.0), *curves(0.1, 0.2, step=1)], step=4) == ""


def test_value_logged_after_a_rung_counts_at_that_rung() -> None:
    asha = rule({"asha": {"min_steps": 4, "reduction_factor": 2}})
    late = [Curve(number=index, values={6: 1.0, 17: 9.0}) for index in range(1, 4)]
    assert verdict(asha, 2.0, late, step=5) != ""
    assert verdict(asha, 0.5, late, step=5) == ""


@pytest.mark.parametrize("pruner", [{"asha": {"min_steps": 1}}, {"hyperband": {"max_steps": 81}}, {"median": {}}])
def test_trial_with_a_nan_metric_is_pruned_at_once(pruner: Any) -> None:
    decides = rule(pruner)
    step = next(decides.rungs(0))
    assert verdict(decides, math.nan, [], step=step) == f"its metric is NaN at step {step}"


def test_nan_of_other_trials_ranks_last() -> None:
    asha = rule({"asha": {"min_steps": 1, "reduction_factor": 2}}, "max")
    assert verdict(asha, -5.0, curves(math.nan, math.nan, 1.0)) == ""


def test_asha_without_step_settings_waits_for_a_complete_trial() -> None:
    asha = rule("asha")
    others = curves(1.0, 2.0, 3.0, step=64)
    assert verdict(asha, 9.0, others, step=64) == ""
    done = [Curve(number=9, values=dict.fromkeys((1, 4, 16, 64, 256), 1.0), complete=True)]
    assert verdict(asha, 9.0, [*others, *done], step=64) != ""
    assert verdict(asha, 9.0, [*curves(1.0, 2.0, 3.0, step=4), *done], step=4) == ""


def test_hyperband_brackets_get_their_shares_and_are_ranked_separately() -> None:
    hyperband = rule({"hyperband": {"min_steps": 1, "max_steps": 27}})
    starts = [first_rungs(hyperband, number)[:1] for number in range(60)]
    shares = [starts.count(start) for start in ([1], [3], [9], [])]
    assert shares == sorted(shares, reverse=True)
    assert min(shares) > 0  # one bracket runs its trials to the end
    own = [number for number in range(60) if starts[number] == [1]]
    foreign = [Curve(number=number, values={9: 0.0}) for number in range(60) if starts[number] == [9]]
    assert hyperband.verdict(Curve(number=own[0], values={9: 5.0}), foreign) == ""


def test_median_pruner_uses_the_median_of_complete_trials() -> None:
    median = rule({"median": {"startup_trials": 3}})
    finished = curves(1.0, 2.0, 3.0, complete=True)
    assert verdict(median, 2.0, finished) == ""
    assert verdict(median, 2.5, finished) == "its best value up to step 1 is 2.5, worse than the median of 2"
    assert verdict(median, 2.5, curves(1.0, 2.0, 3.0)) == ""
    assert verdict(median, 2.5, finished[:2]) == ""
    earlier = Curve(number=0, values={1: 1.0, 2: 9.0})
    assert median.verdict(earlier, curves(1.0, 2.0, 3.0, step=2, complete=True)) == ""


def test_median_pruner_in_max_mode_prunes_lower_values() -> None:
    median = rule({"median": {"startup_trials": 3}}, "max")
    assert (
        verdict(median, 1.5, curves(1.0, 2.0, 3.0, complete=True))
        == "its best value up to step 1 is 1.5, worse than the median of 2"
    )


@pytest.mark.parametrize("name", Pruner.rivals[0])
def test_every_pruner_of_the_spec_has_a_rule(name: str) -> None:
    assert rule({name: {"max_steps": 81} if name == "hyperband" else {}})
