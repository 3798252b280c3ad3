"""One picture of a run or of several: loss, and below it the life of the run or the throughput."""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcaccel.core.durable_files import atomic_write
from hpcaccel.core.formatting import clean, duration
from hpcaccel.errors import UserError
from hpcaccel.submission.runs.attempts import LOSS
from hpcaccel.view.html_report.comparison_report import called
from hpcaccel.view.html_report.run_report import ReportedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["need_matplotlib", "write_picture"]

COLOURS = ("#3e63dd", "#d9730d", "#208368", "#8e4ec6", "#ca244d", "#0d74ce", "#7d6b00", "#60646c")
_LIFE = {
    "queued": "#c3c7d1", "starting": "#f0b429", "training": "#3e63dd", "saving": "#12a594", "lost": "#e5484d",
    "hung": "#8e4ec6", "paused": "#e6e8ec",
}  # fmt: skip
_GREY, _INK = "#b9bdc7", "#60646c"


def need_matplotlib() -> None:
    """Raise UserError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            f"report --png needs matplotlib, which is not installed for {sys.executable}: pip install 'hpcaccel[plot]'"
        )


def write_picture(sources: Sequence[ReportedRun], out: Path) -> None:
    """Write a PNG of one run or of several runs to ``out``, atomically.

    Raises:
        UserError: none of the runs has logged a metric.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    metric = _metric(sources)
    one = sources[0] if len(sources) == 1 else None
    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": _GREY}):
        figure = Figure(figsize=(8.0, 5.4), layout="constrained")
        shape = [3.4, 1.5, 0.55] if one is not None and one.overview.life else [3.4, 1.5]
        rows = figure.subplots(len(shape), 1, height_ratios=shape, squeeze=False)[:, 0]
        _draw_metric(rows[0], sources, metric)
        _draw_pace(rows[1], sources)
        if one is not None and one.overview.life:
            _draw_life(rows[2], one)
        title = f"{one.overview.name}  {one.overview.run_id}" if one else f"{len(sources)} runs"
        figure.suptitle(_plain(title, sources), fontsize=11, x=0.01, ha="left", fontweight="bold")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160)
    atomic_write(out, buffer.getvalue())


def _metric(sources: Sequence[ReportedRun]) -> str:
    logged = [name for source in sources for name in source.curves.names()]
    if not logged:
        raise UserError(
            "nothing to draw: no metric has been logged yet. A run logs with accelerator.log(), hpcaccel.log(), or "
            "lines in $HPCACCEL_METRICS"
        )
    return next((name for name in (LOSS, *logged) if name in logged and "loss" in name), logged[0])


def _draw_metric(axes: Axes, sources: Sequence[ReportedRun], metric: str) -> None:
    names = called(sources)
    for place, (source, name) in enumerate(zip(sources, names, strict=True)):
        colour = COLOURS[place % len(COLOURS)]
        if len(sources) == 1:
            for part in source.curves.repeated(metric):
                axes.plot(*zip(*part.points, strict=True), color=_GREY, linewidth=1.0)
            for attempt in source.overview.history[1:]:
                if attempt.resumed_step is not None:
                    axes.axvline(attempt.resumed_step, color=_GREY, linewidth=0.8, linestyle=(0, (3, 4)), zorder=0)
        curve = source.curves.kept(metric)
        if curve.points:
            axes.plot(*zip(*curve.points, strict=True), color=colour, linewidth=1.6, label=_plain(name, sources))
        if curve.band:
            xs, low, high = zip(*curve.band, strict=True)
            axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
    if len(sources) > 1:
        axes.legend(frameon=False, fontsize=8)
    axes.set_ylabel(_plain(metric, sources))
    axes.grid(axis="y", color="#eceef2", linewidth=0.8)


def _draw_pace(axes: Axes, sources: Sequence[ReportedRun]) -> None:
    for place, source in enumerate(sources):
        points = source.curves.pace().points
        if points:
            axes.plot(*zip(*points, strict=True), color=COLOURS[place % len(COLOURS)], linewidth=1.2)
    axes.set_ylim(bottom=0, top=1.1 * axes.get_ylim()[1])
    axes.set_ylabel("steps/s")
    axes.set_xlabel("step")
    axes.grid(axis="y", color="#eceef2", linewidth=0.8)


def _draw_life(axes: Axes, source: ReportedRun) -> None:
    life = source.overview.life
    first, seen = life[0].started, set[str]()
    for part in life:
        label = "_" if part.part in seen else part.part
        seen.add(part.part)
        width = part.ended - part.started
        axes.barh(0, width, left=part.started - first, color=_LIFE.get(part.part, _INK), label=label)
    axes.set_yticks([])
    axes.set_xticks([0, life[-1].ended - first], ["0", duration(life[-1].ended - first)])
    axes.spines[:].set_visible(False)
    axes.margins(x=0)
    axes.legend(frameon=False, fontsize=7, ncols=7, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def _plain(text: str, sources: Sequence[ReportedRun]) -> str:
    """``text`` on one line with secrets masked, and without the notation that matplotlib reads between dollar signs."""
    for source in sources:
        text = source.mask(text)
    return clean(text).replace("$", r"\$")
