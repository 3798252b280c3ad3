"""Tests of the plots of a sweep: that they can be written, and what they contain."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import append_line
from hpcaccel.errors import UserError
from hpcaccel.sweeps.analysis import MOST_POINTS, Rung, curve, rungs
from hpcaccel.sweeps.sweep_handle import Sweep
from hpcaccel.view import sweep_plot
from hpcaccel.view.sweep_figures import PANELS
from hpcaccel.view.sweep_plot import write_plot
from tests.sweeps.conftest import own_home as own_home
from tests.sweeps.conftest import place as place
from tests.sweeps.sweeping import SPEC, Place, Trials

pytest.importorskip("matplotlib")

CONDITIONAL = SPEC.replace(
    "args.depth: {choice: [2, 4, 8]}",
    "args.depth: {choice: [2, 4, [8, 8]]}\n    args.wide: {int: [1, 9], when: {args.depth: 4}}",
)


def swept(place: Place, *overrides: str) -> tuple[Sweep, Trials]:
    sweep, _ = place.start(*overrides)
    return sweep, Trials(sweep.dir)


def drawings(page: str) -> list[str]:
    return ["<svg" + part.partition("</svg>")[0] + "</svg>" for part in page.split("<svg")[1:]]


def test_page_of_sweep_with_two_metrics_a_condition_and_a_failure(place: Place) -> None:
    Path("sweep.yaml").write_text(CONDITIONAL.replace("metric: loss", "metric: [loss, seconds]\n  mode: [min, min]"))
    sweep, trials = swept(place, "name=a-b")
    for number in range(8):
        trials.complete(10.0 ** (number % 4), 9.0 - number)
    trials.fail()
    page = write_plot(sweep, Path("sweep.html")).read_text()
    found = drawings(page)
    assert len(found) == 4
    for drawing in found:
        ElementTree.fromstring(drawing)
    names = [part.partition('"')[0] for part in page.split(' id="')[1:]]
    assert len(names) == len(set(names))
    assert "Pareto front" in page
    assert "failed (1)" in page
    assert "args.wide" in page


def test_tooltips_of_lines_and_points_name_the_trial(place: Place) -> None:
    sweep, trials = swept(place)
    for number in range(7):
        trials.complete(1.0 + number)
    page = write_plot(sweep, Path("sweep.html")).read_text()
    parallel, history = drawings(page)[:2]
    for drawing, count in ((parallel, 8), (history, 7)):  # the best trial has a second line
        titles = [
            title.text or "" for title in ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}title")
        ]
        assert len(titles) == count
        assert any(title.startswith("trial 3, complete\nloss 4\nargs.") for title in titles)


def test_page_has_no_empty_cell_and_no_legend_covers_its_plot(place: Place) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sweep, trials = swept(place)
    for number in range(8):
        trials.complete(1.0 + number % 3)
    page = write_plot(sweep, Path("sweep.html")).read_text()
    panels = page.split('<div class="panel')[2:]
    narrow = [panel for panel in panels if not panel.startswith(" wide")]
    assert len(narrow) % 2 == 0
    assert "<td></td>" not in page
    data = sweep_plot._gather(sweep)
    for panel in (panel for panel in PANELS if panel.wanted(data)):
        figure = Figure(figsize=sweep_plot.SIZE, layout="constrained")
        axes = figure.add_subplot()
        panel.draw(axes, data)
        FigureCanvasAgg(figure).draw()
        if (legend := axes.get_legend()) is not None:
            assert not legend.get_window_extent().overlaps(axes.get_window_extent()), panel.title
            assert not legend.get_window_extent().overlaps(axes.xaxis.label.get_window_extent()), panel.title


def test_large_sweep_has_lines_for_best_and_some_other_trials(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_plot, "MOST_LINES", 6)
    monkeypatch.setattr(sweep_plot, "MOST_CURVES", 3)
    sweep, trials = swept(place, "sweep.max_trials=40")
    for number in range(12):
        trials.complete(20.0 - number)
    data = sweep_plot._gather(sweep)
    assert len(data.lines) == 6
    assert {9, 10, 11} <= data.lines
    assert len(data.points) == 0
    assert "6 trials are not drawn as lines" in write_plot(sweep, Path("sweep.html")).read_text()


def test_plot_is_written_as_png_and_bad_paths_are_rejected(place: Place) -> None:
    sweep, trials = swept(place)
    with pytest.raises(UserError, match="has a value yet: there is nothing to plot"):
        write_plot(sweep, Path("sweep.png"))
    trials.complete(1.0)
    assert write_plot(sweep, Path("sweep.png")).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"'sweep\.gif' does not have a supported suffix \(allowed: \.html, \.png"):
        write_plot(sweep, Path("sweep.gif"))
    with pytest.raises(UserError, match="does not exist"):
        write_plot(sweep, Path("nowhere/sweep.png"))


def test_rungs_are_counted_and_curves_are_thinned_out(place: Place) -> None:
    sweep, trials = swept(place, "sweep.pruner={asha: {min_steps: 2, reduction_factor: 2, max_steps: 8}}")
    for number, last in enumerate((8, 2, 4)):
        assert trials.begin() == number
        for step in (2, 4, 8)[: (2, 4, 8).index(last) + 1]:
            trials.study.report(number, step, float(number))
    trials.study.complete(0, [0.0])
    trials.study.prune(1)
    found = rungs(sweep.dir, sweep.trials)
    assert found == [Rung(step=2, reached=3, ended=1), Rung(step=4, reached=2, ended=0)]
    for step in range(1, 1001):
        append_line(sweep.dir.trial(0).metrics, {"step": step, "attempt": 1, "time": 0.0, "values": {"loss": 1 / step}})
    points = curve(sweep.dir, sweep.trials[0], "loss")
    assert MOST_POINTS / 2 < len(points) <= MOST_POINTS + 1
    assert (points[0], points[-1]) == ((1, 1.0), (1000, 0.001))
