"""The figures of a sweep for Plotly, as plain data. Their colours suit a light and a dark page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcaccel.view.sweep_data import BAD, BEST, GOOD
from hpcaccel.view.sweep_view import SweepView, TrialCurve

__all__ = ["PRUNED", "TEXT", "best_so_far", "curves", "importances", "layout_of", "rung_funnel"]

TEXT, LINE = "#858a96", "rgba(133,138,150,.22)"
RUNNING, PRUNED = "#8456d8", "rgba(133,138,150,.55)"
COLOURS = {"complete": GOOD, "pruned": PRUNED, "failed": BAD, "running": RUNNING}
LINES_TOGETHER = 60
"""With more pruned curves than this, all of them are one line with gaps: a page with few elements stays fast."""


def layout_of(x: str = "", y: str = "", **more: Any) -> dict[str, Any]:
    """The layout that all figures share."""
    axis = {"gridcolor": LINE, "zeroline": False, "linecolor": LINE, "tickfont": {"size": 11}, "automargin": True}
    title = {"font": {"size": 11}, "standoff": 8}
    base = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": TEXT, "size": 11, "family": "inherit"},
        "margin": {"l": 48, "r": 12, "t": 8, "b": 40},
        "xaxis": {**axis, "title": {"text": x, **title}, **more.pop("xaxis", {})},
        "yaxis": {**axis, "title": {"text": y, **title}, **more.pop("yaxis", {})},
        "showlegend": False,
        "hoverlabel": {"font": {"family": "var(--h-mono), monospace", "size": 11}},
        "uirevision": "kept",
        "height": 256,
    }
    return {**base, **more}


def best_so_far(sweep: SweepView) -> dict[str, Any]:
    """The best value of a complete trial against GPU-hours, with the budget as a line."""
    points = list(sweep.best_so_far)
    if not points:
        return {"data": [], "layout": layout_of("GPU-hours", sweep.metric)}
    hours, values = [one for one, _ in points], [one for _, one in points]
    end = max(sweep.gpu_hours, hours[-1])
    line = {
        "type": "scatter", "mode": "lines", "x": [*hours, end], "y": [*values, values[-1]], "name": "best so far",
        "line": {"shape": "hv", "color": BEST, "width": 2}, "hoverinfo": "skip",
    }  # fmt: skip
    marks = {
        "type": "scatter", "mode": "markers", "x": hours, "y": values, "marker": {"color": BEST, "size": 6},
        "hovertemplate": f"{sweep.metric} %{{y:.5g}}<br>%{{x:.3g}} GPU-hours<extra></extra>",
    }  # fmt: skip
    shapes, notes = [], []
    budget = sweep.budget_gpu_hours
    if budget is not None:
        shapes.append(
            {
                "type": "line", "x0": budget, "x1": budget, "yref": "paper", "y0": 0, "y1": 1,
                "line": {"color": BAD, "width": 1.5, "dash": "dash"},
            }
        )  # fmt: skip
        notes.append(
            {
                "x": budget, "xanchor": "right", "yref": "paper", "y": 1, "text": f"budget {budget:g} ",
                "showarrow": False,
                "font": {"color": BAD, "size": 11},
            }
        )  # fmt: skip
    most = max(end, budget or 0.0) * 1.04 or 1.0
    scale = {"type": "log"} if _is_wide(values) else {}
    return {
        "data": [line, marks],
        "layout": layout_of(
            "GPU-hours", sweep.metric, shapes=shapes, annotations=notes,
            xaxis={"range": [0, most]}, yaxis={"nticks": 6, **scale},
        ),
    }  # fmt: skip


def rung_funnel(sweep: SweepView) -> dict[str, Any]:
    """How many trials reached each rung, and how many of them went on."""
    names = [f"step {rung.step:,}" for rung in sweep.rungs]
    went_on = [rung.promoted for rung in sweep.rungs]
    entered = [rung.entered for rung in sweep.rungs]
    most = max((rung.entered for rung in sweep.rungs), default=1)

    def bars(title: str, counts: list[int], colour: str) -> dict[str, Any]:
        return {
            "type": "bar", "orientation": "h", "y": names, "x": counts, "name": title, "marker": {"color": colour},
            "base": [-count / 2 for count in counts],
            "hovertemplate": "%{y}: %{customdata} " + title + "<extra></extra>", "customdata": counts,
        }  # fmt: skip

    notes = [
        {
            "x": most / 2, "y": name, "xanchor": "left", "showarrow": False, "font": {"size": 11},
            "text": f" {rung.entered} → {rung.promoted}",
        }
        for name, rung in zip(names, sweep.rungs, strict=True)
    ]  # fmt: skip
    return {
        "data": [bars("reached it", entered, PRUNED), bars("went on", went_on, GOOD)],
        "layout": layout_of(
            barmode="overlay", bargap=0.28, annotations=notes,
            xaxis={"visible": False, "range": [-most / 2 * 1.02, most / 2 * 1.45]},
            yaxis={"range": [len(names) - 0.5, -0.5], "showgrid": False, "type": "category"},
            margin={"l": 70, "r": 4, "t": 8, "b": 12},
        ),
    }  # fmt: skip


def curves(sweep: SweepView) -> dict[str, Any]:
    """The learning curves; grey ones were pruned, the best one is on top."""
    best = sweep.best.number if sweep.best is not None else None
    order = {"pruned": 0, "failed": 1, "complete": 2, "running": 3}
    known = sorted(sweep.curves, key=lambda one: (one.trial == best, order.get(one.state, 0)))
    pruned = [one for one in known if one.state == "pruned" and one.trial != best]
    together = pruned if len(pruned) > LINES_TOGETHER else []
    data = [_joined(together, sweep.metric)] if together else []
    for one in known:
        if one not in together:
            data.append(_curve(one, sweep.metric, is_best=one.trial == best))
    steps = [step for one in known for step, _ in one.points]
    values = [value for one in known for _, value in one.points if value is not None]
    lines = [
        {
            "type": "line", "x0": rung.step, "x1": rung.step, "yref": "paper", "y0": 0, "y1": 1, "layer": "below",
            "line": {"color": LINE, "width": 1, "dash": "dot"},
        }
        for rung in sweep.rungs
    ]  # fmt: skip
    wide = bool(steps) and max(steps) > 50 * max(1, min(steps))
    return {
        "data": data,
        "layout": layout_of(
            "step", sweep.metric, shapes=lines, hovermode="closest",
            xaxis={"type": "log"} if wide else {}, yaxis={"type": "log"} if _is_wide(values) else {},
        ),
    }  # fmt: skip


def _curve(curve: TrialCurve, metric: str, *, is_best: bool) -> dict[str, Any]:
    colour = BEST if is_best else COLOURS.get(curve.state, PRUNED)
    return {
        "type": "scatter", "mode": "lines" if len(curve.points) > 1 else "markers",
        "x": [step for step, _ in curve.points], "y": [value for _, value in curve.points],
        "line": {"color": colour, "width": 2.4 if is_best else 1.1}, "marker": {"color": colour, "size": 4},
        "opacity": 1 if is_best or curve.state == "running" else 0.75,
        "hovertemplate": f"trial {curve.trial}, {curve.state}<br>step %{{x}}: {metric} %{{y:.5g}}<extra></extra>",
    }  # fmt: skip


def _joined(some: Sequence[TrialCurve], metric: str) -> dict[str, Any]:
    x: list[int | None] = []
    y: list[float | None] = []
    names: list[int | None] = []
    for one in some:
        x += [*(step for step, _ in one.points), None]
        y += [*(value for _, value in one.points), None]
        names += [one.trial] * (len(one.points) + 1)
    return {
        "type": "scatter", "mode": "lines", "x": x, "y": y, "customdata": names, "opacity": 0.6,
        "line": {"color": PRUNED, "width": 0.8},
        "hovertemplate": f"trial %{{customdata}}, pruned<br>step %{{x}}: {metric} %{{y:.5g}}<extra></extra>",
    }  # fmt: skip


def importances(shares: Mapping[str, float]) -> dict[str, Any]:
    """Each parameter's share of the differences between trials."""
    names, values = [name.removeprefix("args.") for name in shares], [100 * share for share in shares.values()]
    return {
        "data": [
            {
                "type": "bar", "orientation": "h", "y": names, "x": values, "marker": {"color": GOOD},
                "text": [f"{value:.0f} %" for value in values], "textposition": "outside", "cliponaxis": False,
                "hovertemplate": "%{y}: %{x:.1f} %<extra></extra>",
            }
        ],
        "layout": layout_of(
            bargap=0.35, xaxis={"visible": False, "range": [0, max(values, default=1) * 1.2]},
            yaxis={"range": [len(names) - 0.5, -0.5], "showgrid": False, "type": "category"},
            margin={"l": 90, "r": 12, "t": 8, "b": 12},
        ),
    }  # fmt: skip


def _is_wide(values: Sequence[float]) -> bool:
    """Whether a logarithmic axis shows the values better: all are positive and differ by more than a factor of 20."""
    return bool(values) and min(values) > 0 and max(values) > 20 * min(values)
