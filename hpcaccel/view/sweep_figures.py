"""The plots of a sweep, drawn with matplotlib on axes that the caller passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.view.sweep_data import BAD, BEST, DIM, GOOD, INK, SweepData, are_trials, is_trial
from hpcaccel.view.sweep_parallel import draw_parallel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PANELS", "Panel"]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot of a sweep."""

    title: str
    about: str
    """The caption."""
    draw: Callable[[Axes, SweepData], None]
    wide: bool = False
    wanted: Callable[[SweepData], bool] = lambda data: True


def value_of(trial: TrialRecord) -> float:
    assert trial.values
    return trial.values[0]


def draw_history(axes: Axes, data: SweepData) -> None:
    """Draw each trial's value, and the best value so far."""
    complete, pruned = data.with_value("complete"), data.with_value("pruned")
    failed = [trial for trial in data.trials if trial.state == "failed"]
    _points(axes, data, pruned, s=14, color=DIM, label=f"pruned ({len(pruned)})", zorder=2)
    _points(axes, data, complete, s=22, color=GOOD, label=f"complete ({len(complete)})", zorder=3)
    if failed:
        low, _ = axes.get_ylim()
        axes.scatter(
            [trial.number for trial in failed], [low] * len(failed), marker="x", s=22, color=BAD,
            label=f"failed ({len(failed)})", zorder=3,
        )  # fmt: skip
    best = min if data.goal.modes[0] == "min" else max
    steps: list[tuple[int, float]] = []
    for trial in complete:
        steps.append((trial.number, value_of(trial) if not steps else best(steps[-1][1], value_of(trial))))
    if steps:
        steps.append((max(trial.number for trial in data.trials), steps[-1][1]))
        axes.step(*zip(*steps, strict=True), where="post", color=BEST, linewidth=1.6, label="best so far", zorder=4)
    _whole_numbers(axes)
    axes.set_xlabel("trial")
    _value_axis(axes, data)
    _legend(axes)


def draw_curves(axes: Axes, data: SweepData) -> None:
    """Draw the metric by step for the trials in ``data.lines``."""
    for trial in data.trials:
        points = data.curves.get(trial.number)
        if not points or trial.number not in data.lines or (data.best is not None and trial.number == data.best.number):
            continue
        colour, width = (GOOD, 1.0) if trial.state == "complete" else (BAD if trial.state == "failed" else DIM, 0.7)
        (line,) = axes.plot(*zip(*points, strict=True), color=colour, linewidth=width, alpha=0.75)
        is_trial(line, trial.number)
        if len(points) == 1 or trial.state == "pruned":
            (end,) = axes.plot(*points[-1], marker="o", markersize=2.5, color=colour)
            is_trial(end, trial.number, 1)
    if data.best is not None and data.curves.get(data.best.number):
        points = data.curves[data.best.number]
        label = f"trial {data.best.number}, the best"
        (line,) = axes.plot(*zip(*points, strict=True), color=BEST, linewidth=2.0, label=label)
        is_trial(line, data.best.number)
        _legend(axes)
    for rung in data.rungs:
        axes.axvline(rung.step, color=DIM, linewidth=0.6, linestyle=":", zorder=0)
    axes.set_xlabel("step")
    steps = [step for points in data.curves.values() for step, _ in points]
    if steps and max(steps) > 50 * max(1, min(steps)):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
    _value_axis(axes, data)


def draw_rungs(axes: Axes, data: SweepData) -> None:
    """Draw how many trials reached each rung, and how many were pruned there."""
    places = range(len(data.rungs))
    reached = [rung.reached for rung in data.rungs]
    ended = [rung.ended for rung in data.rungs]
    on = [came - left for came, left in zip(reached, ended, strict=True)]
    axes.barh(places, on, color=GOOD, label="continued", height=0.7)
    axes.barh(places, ended, left=on, color=DIM, label="pruned here", height=0.7)
    for place, rung in zip(places, data.rungs, strict=True):
        axes.annotate(str(rung.reached), (rung.reached, place), xytext=(4, 0), textcoords="offset points", va="center",
                      fontsize=8, color=INK)  # fmt: skip
    axes.set_yticks(list(places), [f"step {rung.step}" for rung in data.rungs])
    axes.invert_yaxis()
    _whole_numbers(axes)
    axes.margins(x=0.12)
    axes.set_xlabel("trials")
    _legend(axes)


def draw_importances(axes: Axes, data: SweepData) -> None:
    """Draw the importance of each parameter."""
    names = list(data.importances.shares)
    shares = [100 * data.importances.shares[name] for name in names]
    axes.barh(range(len(names)), shares, color=GOOD, height=0.7)
    for place, share in enumerate(shares):
        axes.annotate(f"{share:.0f} %", (share, place), xytext=(4, 0), textcoords="offset points", va="center",
                      fontsize=8, color=INK)  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    where = "at the end" if data.importances.step is None else f"at step {data.importances.step}"
    axes.set_xlabel(f"% of the difference between good and other trials, {where}")


def draw_front(axes: Axes, data: SweepData) -> None:
    """Draw the first two metrics of each complete trial, and the Pareto front."""
    complete = data.with_value("complete")
    costs = {trial.number: data.goal.cost(trial.values or ()) for trial in complete}
    front = [trial for trial in complete if not any(_beats(other, costs[trial.number]) for other in costs.values())]
    for trials, colour, label in ((complete, GOOD, "complete"), (front, BEST, "Pareto front")):
        pairs = [(trial.values or [])[:2] for trial in trials]
        drawn = axes.scatter([x for x, _ in pairs], [y for _, y in pairs], s=24, color=colour, label=label, zorder=3)
        are_trials(drawn, len(data.points))
        data.points.append(trials)
    for trial in front:
        assert trial.values
        axes.annotate(str(trial.number), (trial.values[0], trial.values[1]), xytext=(4, 4), textcoords="offset points",
                      fontsize=7)  # fmt: skip
    axes.set_xlabel(f"{data.goal.metrics[0]} ({data.goal.modes[0]})")
    axes.set_ylabel(f"{data.goal.metrics[1]} ({data.goal.modes[1]})")
    _legend(axes)


PANELS = (
    Panel(
        title="Parallel coordinates",
        about="One line per trial, from its parameters to its value. Dark: good value; grey: pruned.",
        draw=draw_parallel,
        wide=True,
    ),
    Panel(title="History", about="The value of each trial, in order of start.", draw=draw_history),
    Panel(
        title="Learning curves",
        about="The metric at each step. Dotted lines are rungs.",
        draw=draw_curves,
        wanted=lambda data: any(data.curves.values()),
    ),
    Panel(
        title="Rungs",
        about="Number of trials that reached each rung, and number pruned there.",
        draw=draw_rungs,
        wanted=lambda data: bool(data.rungs),
    ),
    Panel(
        title="Importance",
        about="Importance of each parameter for good values (PED-ANOVA). With few trials, a rough estimate only.",
        draw=draw_importances,
        wanted=lambda data: bool(data.importances.shares),
    ),
    Panel(
        title="Front",
        about="The first two metrics of each complete trial, and the Pareto front.",
        draw=draw_front,
        wanted=lambda data: len(data.goal.metrics) > 1,
    ),
)


def _points(axes: Axes, data: SweepData, trials: Sequence[TrialRecord], **style: Any) -> None:
    drawn = axes.scatter([trial.number for trial in trials], [value_of(trial) for trial in trials], **style)
    are_trials(drawn, len(data.points))
    data.points.append(trials)


def _legend(axes: Axes) -> None:
    """Put the legend below the plot, where it covers nothing."""
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.17), borderaxespad=0.0)


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return list(one) != list(other) and all(a <= b for a, b in zip(one, other, strict=True))


def _value_axis(axes: Axes, data: SweepData) -> None:
    """Label the value axis. Make it logarithmic if all values are positive and they differ by more than a factor of
    20."""
    axes.set_ylabel(data.metric)
    values = [value_of(trial) for trial in data.with_value("complete", "pruned")]
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")


def _whole_numbers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
