"""The curves of a run's logged metrics, drawn with matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hpcaccel.core.formatting import clean, did_you_mean, shortened
from hpcaccel.core.metrics_reader import Line
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import UserError
from hpcaccel.submission.runs.attempts import Attempt, Metrics, read_attempts

__all__ = ["RunFigure", "plot_run"]

FIRST_CHOICE = "loss"
WIDTH, HEIGHT = 7.0, 3.2
"""Size of one metric's axes, in inches."""
_COLOUR, _REPEATED, _MARK = "#1f6feb", "#b6bcc4", "#8a929c"
_SHOWN_NAMES = 8
_FEW_POINTS = 40
"""If an attempt has logged at most this many points, each is drawn as a dot, too."""


class RunFigure(Figure):
    """A figure that a notebook shows as a picture even if pyplot has not been imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The lines of one attempt."""

    attempt: int
    lines: list[Line]
    kept_until: float
    """A later attempt repeated the steps after this one; infinity if there is no such attempt."""


def plot_run(run: RunDir, metric: str | Sequence[str] | None, *, name: str) -> Figure:
    """See ``Run.plot``.

    Args:
        name: the run's name, for the title.

    Raises:
        UserError: ``metric`` has not been logged, or no metric has.
    """
    metrics = Metrics(run)
    lines: list[Line] = []
    metrics.read(into=lines)
    chosen = _chosen(metric, metrics, run)
    attempts = read_attempts(run, metrics.logged)
    parts = _parts(lines, attempts)
    figure = RunFigure(figsize=(WIDTH, HEIGHT * len(chosen) + 0.4), layout="constrained", dpi=110)
    axes: list[Axes] = list(figure.subplots(len(chosen), sharex=True, squeeze=False)[:, 0])
    for one, place in zip(chosen, axes, strict=True):
        _draw(place, one, parts, attempts)
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(_plain(f"{name}  {run.run_id}"), fontsize=10)
    return figure


def _chosen(metric: str | Sequence[str] | None, metrics: Metrics, run: RunDir) -> list[str]:
    """The names of the metrics to draw. Raises UserError if there are none, or if one has not been logged."""
    known = list(metrics.last)
    if not known:
        warning = f". {metrics.warning}" if metrics.warning else ""
        raise UserError(
            f"run {run.run_id} has logged no metrics yet: there is nothing to plot. A run logs with accelerator.log(), "
            f"hpcaccel.log(), or lines in $HPCACCEL_METRICS{warning}"
        )
    if metric is None:
        return [FIRST_CHOICE if FIRST_CHOICE in known else known[0]]
    wanted = [metric] if isinstance(metric, str) else list(metric)
    if not wanted:
        raise UserError("metric=[] names no metric: pass at least one name, or None")
    for one in wanted:
        if one not in known:
            hint = did_you_mean(str(one), known, cutoff=0.6)
            raise UserError(
                f"run {run.run_id} has not logged the metric {one!r} (logged: {shortened(known, _SHOWN_NAMES)}){hint}"
            )
    return wanted


def _parts(lines: Sequence[Line], attempts: Sequence[Attempt]) -> list[_Part]:
    """The lines by attempt, oldest first."""
    found: dict[int, list[Line]] = {}
    for line in lines:
        found.setdefault(line.attempt, []).append(line)
    first = {attempt.number: attempt.resumed_step for attempt in attempts if attempt.resumed_step is not None}
    for number, own in found.items():
        first.setdefault(number, min(line.step for line in own) - 1)
    return [
        _Part(
            attempt=number,
            lines=sorted(own, key=lambda line: line.step),
            kept_until=min((step for later, step in first.items() if later > number), default=math.inf),
        )
        for number, own in sorted(found.items())
    ]


def _draw(axes: Axes, metric: str, parts: Sequence[_Part], attempts: Sequence[Attempt]) -> None:
    repeated = False
    for part in parts:
        points = [(line.step, line.values[metric]) for line in part.lines if metric in line.values]
        kept = [point for point in points if point[0] <= part.kept_until]
        lost = points[max(0, len(kept) - 1) :] if len(kept) < len(points) else []
        repeated = repeated or bool(lost)
        for some, colour, width in ((lost, _REPEATED, 1.0), (kept, _COLOUR, 1.5)):
            if some:
                dots = "o" if len(points) <= _FEW_POINTS else ""
                axes.plot(*zip(*some, strict=True), color=colour, linewidth=width, marker=dots, markersize=2.5)
    for before, after in pairwise(attempts):
        if after.resumed_step is not None:
            _mark(axes, before, after, after.resumed_step)
    if repeated:
        axes.plot([], [], color=_REPEATED, label="repeated by a later attempt")
        axes.legend(frameon=False, fontsize=8)
    axes.set_ylabel(_plain(metric))
    axes.spines[["top", "right"]].set_visible(False)


def _mark(axes: Axes, before: Attempt, after: Attempt, step: int) -> None:
    """Mark the step at which ``after`` resumed, with the reason why the attempt before it had ended."""
    reason = f": {before.end.reason.replace('_', ' ')}" if before.end is not None else ""
    axes.axvline(step, color=_MARK, linewidth=0.8, linestyle="--", zorder=0)
    axes.annotate(
        _plain(f"attempt {after.number}{reason}"),
        (step, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(3, -2),
        textcoords="offset points",
        rotation=90,
        va="top",
        fontsize=7,
        color=_MARK,
    )


def _plain(text: str) -> str:
    """``text`` on one line, without the mathematical notation that matplotlib reads between dollar signs."""
    return clean(text).replace("$", r"\$")
