"""``sweep plot``: writes the plots of a sweep to one file, an image or a self-contained HTML page."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccel.core.durable_files import atomic_write
from hpcaccel.core.formatting import clock_time
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import UserError
from hpcaccel.sweeps.analysis import curve, importances, rungs
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.results import best_first
from hpcaccel.sweeps.sweep_handle import Sweep
from hpcaccel.sweeps.sweep_overview import SweepOverview
from hpcaccel.view.sweep_data import SweepData, shown, with_titles
from hpcaccel.view.sweep_figures import PANELS, Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_plot"]

PICTURES = (".png", ".svg", ".pdf")
SIZE, WIDE = (5.6, 3.5), (11.6, 3.7)
"""Sizes of a narrow and of a wide panel, in inches."""
MOST_CURVES = 400
MOST_LINES = 600
"""Maximum number of trials drawn as lines. In a larger sweep, these are the best ``MOST_CURVES`` and an evenly spaced
selection of the rest."""
ROWS = 20


def write_plot(sweep: Sweep, out: Path) -> Path:
    """Write the plots of ``sweep`` to ``out``; the suffix selects the format.

    Returns:
        The absolute path of the file.

    Raises:
        UserError: the suffix is unknown, the folder does not exist, matplotlib is not installed, or there is nothing to
            draw yet.
    """
    out = out.expanduser().absolute()
    if out.suffix not in (".html", *PICTURES):
        raise UserError(f"{out.name!r} does not have a supported suffix (allowed: .html, {', '.join(PICTURES)})")
    if not out.parent.is_dir():
        raise UserError(f"the directory {out.parent} does not exist: create it, or choose another --out")
    _need_matplotlib()
    data = _gather(sweep)
    if not data.with_value("complete", "pruned"):
        raise UserError(f"no trial of sweep {sweep.run_id} has a value yet: there is nothing to plot")
    panels = [panel for panel in PANELS if panel.wanted(data)]
    if out.suffix == ".html":
        atomic_write(out, _page(sweep, data, panels))
    else:
        atomic_write(out, _picture(sweep, data, panels, out.suffix[1:]))
    return out


def _need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            f"sweep plot needs matplotlib, which is not installed for {sys.executable}: pip install 'hpcaccel[plot]'"
        )


def _gather(sweep: Sweep) -> SweepData:
    spec, trials = sweep.spec, sweep.trials
    goal, reached = sweep.goal, rungs(sweep.dir, trials)
    leaders = best_first(trials, goal)
    names = {number: trials[place] for place, number in enumerate(trial.number for trial in trials)}
    return SweepData(
        goal=goal,
        trials=trials,
        best=names[leaders[0]] if leaders else None,
        curves=_curves(sweep.dir, trials, leaders, goal.metrics[0]),
        importances=importances(sweep.dir, trials, reached),
        rungs=reached,
        log_parameters=frozenset(name for name, parameter in spec.sweep.parameters.items() if parameter.log),
        lines=_lines(trials, leaders),
    )


def _lines(trials: list[TrialRecord], leaders: list[int]) -> frozenset[int]:
    if len(trials) <= MOST_LINES:
        return frozenset(trial.number for trial in trials)
    best = leaders[:MOST_CURVES]
    others = [trial.number for trial in trials if trial.number not in set(best)]
    room = MOST_LINES - len(best)
    return frozenset([*best, *(others[place * len(others) // room] for place in range(room))])


def _curves(
    sweep: SweepDir, trials: list[TrialRecord], leaders: list[int], metric: str
) -> dict[int, list[tuple[int, float]]]:
    """Steps and values of ``metric`` for each trial, from its metrics files. In a sweep with more than ``MOST_CURVES``
    trials, those that are neither among the best nor among the first have only the values in the journal."""
    led = set(leaders)
    order = [*leaders, *(trial.number for trial in trials if trial.number not in led)]
    whole = set(order[:MOST_CURVES])
    return {
        trial.number: curve(sweep, trial, metric) if trial.number in whole else sorted(trial.intermediate.items())
        for trial in trials
    }


@contextmanager
def _style() -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": "#8a929c",
            "svg.fonttype": "none",
            "svg.hashsalt": "hpcaccel",
        }
    ):
        yield


def _picture(sweep: Sweep, data: SweepData, panels: list[Panel], kind: str) -> bytes:
    from matplotlib.figure import Figure

    wide, narrow = [panel for panel in panels if panel.wide], [panel for panel in panels if not panel.wide]
    rows = len(wide) + -(-len(narrow) // 2)
    with _style():
        figure = Figure(figsize=(WIDE[0], rows * (SIZE[1] + 0.2) + 0.4), layout="constrained")
        grid = figure.add_gridspec(rows, 2)
        for row, panel in enumerate(wide):
            _draw(figure, grid[row, :], panel, data)
        for place, panel in enumerate(narrow):
            alone = place == len(narrow) - 1 and place % 2 == 0
            row = len(wide) + place // 2
            _draw(figure, grid[row, :] if alone else grid[row, place % 2], panel, data)
        figure.suptitle(f"{sweep.name}  {sweep.run_id}", fontsize=11)
        return _saved(figure, kind)


def _draw(figure: Figure, place: Any, panel: Panel, data: SweepData) -> None:
    axes = figure.add_subplot(place)
    panel.draw(axes, data)
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")


def _saved(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else {}
    figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def _page(sweep: Sweep, data: SweepData, panels: list[Panel]) -> str:
    from hpcaccel.render.templates import html_template

    now = sweep.status()
    is_odd = sum(not panel.wide for panel in panels) % 2 == 1
    wide = {panel.title for panel in panels if panel.wide} | ({panels[-1].title} if is_odd else set())
    columns, rows = _best_rows(sweep, data)
    return html_template("sweep.html.j2").render(
        sweep=now,
        made=clock_time(sweep.dir.sweep.stat().st_mtime),
        facts=_facts(now),
        panels=[(panel, panel.title in wide, _svg(panel, data, wide=panel.title in wide)) for panel in panels],
        left_out=len(data.trials) - len(data.lines),
        columns=columns,
        rows=rows,
    )


def _facts(now: SweepOverview) -> list[tuple[str, str]]:
    counted = [(state, str(count)) for state, count in now.trials.items() if count]
    facts = [*counted, ("GPU-hours", f"{now.gpu_hours:.3g}")]
    if now.best is not None:
        values = [(f"best {name}, trial {now.best.trial}", f"{value:.5g}") for name, value in now.best.values.items()]
        facts = [*values, *facts]
    return facts


def _svg(panel: Panel, data: SweepData, *, wide: bool) -> str:
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=WIDE if wide else SIZE, layout="constrained")
        panel.draw(figure.add_subplot(), data)
        text = _saved(figure, "svg").decode()
    # Several plots share a page, so their ids (of clip paths, for instance) must differ.
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{panel.title.split()[0].lower()}-", text)
    return with_titles(text[text.index("<svg") :], data, data.points)


def _best_rows(sweep: Sweep, data: SweepData) -> tuple[list[str], list[list[str]]]:
    table = {row["trial"]: row for row in sweep.table()}
    chosen = [table[number] for number in best_first(data.trials, data.goal)[:ROWS]]
    if not chosen:
        return [], []
    return list(chosen[0]), [["–" if value is None else shown(value) for value in row.values()] for row in chosen]
