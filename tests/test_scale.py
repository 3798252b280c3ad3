"""The simulation of `make scale`: its clock, its laws, and predictions from the recorded constants."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [name for name in sys.modules if name == "scale" or name.startswith("scale.")]:
        del sys.modules[name]


def recorded():
    from scale import measuring
    from scale.group_protocols import Protocols

    terms, constants = measuring.load()
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


def test_faults_cost_less_with_snapshots_and_spare_nodes_and_nothing_without_faults():
    from scale.lost_time import SCENARIOS, Recovery, ettr

    shares = [ettr(recovery, interval_seconds=1800, mttf_hours=1.8) for recovery in SCENARIOS.values()]
    assert shares[0] < shares[2] < shares[4] < 1
    assert shares[0] < shares[3] < shares[4]
    assert ettr(Recovery(), interval_seconds=1800, mttf_hours=1e9) == pytest.approx(1800 / 1801, abs=1e-4)


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


def test_program_lists_its_options(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("scale", run_name="__main__")
    assert "--recorded" in capsys.readouterr().out
