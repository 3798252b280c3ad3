"""The simulation of `make scale`: its clock, its laws, and predictions from the recorded constants."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [name for name in sys.modules if name == "scale" or name.startswith("scale.")]:
        del sys.modules[name]


def recorded():
    from scale.group_protocols import Protocols
    from scale.measuring import load

    terms, constants = load()
    return Protocols.of(terms, constants)


def test_server_serves_one_request_after_the_other_in_order_of_arrival():
    from scale.event_clock import EventClock, QueueServer

    clock, served = EventClock(), []
    server = QueueServer(clock)

    def arrive(number):
        server.request(2.0, lambda: served.append((number, clock.now)))

    for number, arrival in enumerate((0.0, 0.5, 5.0)):
        clock.after(arrival, partial(arrive, number))
    assert clock.run() == 7.0
    assert served == [(0, 2.0), (1, 4.0), (2, 7.0)]
    assert (server.requests, server.busy_seconds, server.longest_queue) == (3, 6.0, 1)


@pytest.mark.parametrize(("law", "values"), [("P", {2: 7, 4: 13, 64: 193}), ("constant", {2: 4, 4: 4, 64: 4})])
def test_law_is_fitted_to_the_smallest_sizes_and_checked_at_the_others(law, values):
    from scale.cost_term import CostTerm

    term = CostTerm("requests", "requests", law, values, 1.2)
    assert term.ratios() == {64: pytest.approx(1.0)}
    assert term.holds
    assert not CostTerm("requests", "requests", law, {**values, 64: 1000}, 1.2).holds
    assert CostTerm.from_json(term.to_json()) == term


def test_recorded_constants_predict_what_was_measured():
    protocols = recorded()
    assert [name for name, term in protocols.terms.items() if not term.holds] == []


def test_requests_of_a_rendezvous_are_three_per_rank_and_few_of_rank_0():
    protocols = recorded()
    for ranks in (16, 1024):
        found = protocols.rendezvous(ranks)
        assert 3 * ranks <= found.requests <= 3 * ranks + 20
        assert found.seconds >= ranks * 3 * protocols.request_seconds


def test_faults_cost_less_with_snapshots_and_other_nodes_and_nothing_without_faults():
    from scale.lost_time import SCENARIOS, Recovery, ettr

    shares = {name: ettr(one, interval_seconds=1800, mttf_hours=1.8) for name, one in SCENARIOS.items()}
    for first in ("files", "snapshots"):
        ends = ("", ", fewer nodes", ", spare nodes")
        queue, fewer, spare = (shares[f"{first}, warm restart{end}"] for end in ends)
        assert shares["files, cold restart"] < queue < fewer < spare < 1
    assert shares["files, warm restart, spare nodes"] < shares["snapshots, warm restart, spare nodes"]
    spare, fewer = (shares[f"snapshots, warm restart, {nodes} nodes"] for nodes in ("spare", "fewer"))
    assert spare - fewer < 0.02  # fewer nodes load the snapshots, too
    assert ettr(Recovery(), interval_seconds=1800, mttf_hours=1e9) == pytest.approx(1800 / 1801, abs=1e-4)


def test_used_up_nodes_come_back_by_a_requeue_and_fewer_nodes_do_less():
    from scale.lost_time import Recovery, ettr

    nodes = {"number of nodes": 10.0, "share of lost nodes": 1.0}
    fixed: dict[str, Any] = {"interval_seconds": 600, "mttf_hours": 5.0}
    queue = ettr(Recovery(), values=nodes, **fixed)
    for recovery, few in (
        (Recovery(spare=True), {"number of spare nodes": 1.0}),
        (Recovery(shrink=True), {"smallest number of nodes": 9.0}),
    ):
        some = ettr(recovery, values={**nodes, **few}, **fixed)
        many = ettr(recovery, values={**nodes, "number of spare nodes": 1e9, "smallest number of nodes": 1.0}, **fixed)
        if recovery.spare:
            assert queue < some < many
        else:  # nine nodes of ten, half of the time
            assert queue - 0.06 < some < queue
            assert many == pytest.approx(0.55, abs=0.05)  # from ten nodes down to one, and from the start again
    always = ettr(Recovery(shrink=True), values={**nodes, "smallest number of nodes": 10.0}, **fixed)
    assert always == queue


def test_simulated_share_is_that_of_the_closed_form():
    """A fault costs a restart and, in the mean, half an interval and the time of the commit."""
    from scale.lost_time import PARAMETERS, Recovery, ettr

    values = {"share of lost nodes": 0.0}
    interval, mttf = 600.0, 5 * 3600.0
    cost = {name: PARAMETERS[name].value for name in ("detection", "cold start", "load from files", "durable after")}
    stall = PARAMETERS["stall of a save"].value
    share = (interval / (interval + stall)) * (mttf - (interval + stall) / 2 - cost.pop("durable after") - stall)
    expected = share / (mttf + sum(cost.values()))
    setting: dict[str, Any] = {"interval_seconds": interval, "mttf_hours": 5.0, "values": values}
    found = [ettr(Recovery(), **setting, seed=seed) for seed in range(20)]
    assert sum(found) / len(found) == pytest.approx(expected, rel=0.01)


def test_sweep_runs_all_trials_and_waits_for_the_journal_when_it_is_the_bottleneck():
    from scale.many_trials import sweep

    terms = recorded().terms
    found = sweep(terms, trials=2000, workers=100, trial_seconds=600)
    assert 2000 / 100 * 600 / 3600 * 0.8 < found.hours < 2000 / 100 * 600 / 3600 * 2
    busy = sweep(terms, trials=2000, workers=1000, trial_seconds=0.01)
    assert busy.journal_busy > 0.9
    assert busy.waiting_seconds > 100 * found.waiting_seconds


def test_plots_are_written(tmp_path):
    from scale.scale_plots import draw

    for path in draw(recorded(), tmp_path):
        assert path.read_text().lstrip().startswith("<?xml")


@pytest.mark.torch
def test_program_lists_its_options(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("scale", run_name="__main__")
    assert "--recorded" in capsys.readouterr().out
