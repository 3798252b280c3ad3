"""The parallel-coordinates plot of a sweep: each parameter and each metric is a vertical axis."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.view.sweep_data import BEST, DIM, INK, SweepData, is_trial, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Coordinate", "choice_axis", "draw_parallel", "numeric_axis"]

FEW_VALUES = 5
"""An axis with at most this many distinct numbers has a tick for each of them."""
MOST_TICKS = 12


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """One vertical axis, from 0 at the bottom to 1 at the top."""

    title: str
    places: Mapping[int, float]
    """Position of each trial on the axis, by trial number. Trials without the parameter are left out."""
    ticks: list[tuple[float, str]]


def draw_parallel(axes: Axes, data: SweepData) -> None:
    """Draw a line for each trial in ``data.lines`` that has a value, from its parameters to its metrics."""
    from matplotlib import colormaps

    trials = [trial for trial in data.with_value("complete", "pruned") if trial.number in data.lines]
    coordinates = [*_parameters(data, trials), *_metrics(data, trials)]
    complete = [trial for trial in trials if trial.state == "complete"]
    complete.sort(key=lambda trial: data.goal.cost(trial.values or ()), reverse=True)
    shades = colormaps["viridis_r"]
    for trial in trials:
        if trial.state == "pruned":
            _line(axes, coordinates, trial, color=DIM, linewidth=0.6, alpha=0.6, zorder=1)
    for rank, trial in enumerate(complete):
        colour = shades(0.15 + 0.85 * (rank + 1) / len(complete))
        _line(axes, coordinates, trial, color=colour, linewidth=1.1, alpha=0.85, zorder=2)
    if data.best is not None:
        _line(axes, coordinates, data.best, part=1, color=BEST, linewidth=2.4, zorder=3)
    for x, coordinate in enumerate(coordinates):
        axes.axvline(x, color=INK, linewidth=0.8, zorder=4)
        for y, text in coordinate.ticks:
            axes.annotate(
                text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7.5, color=INK, zorder=5,
                bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
            )  # fmt: skip
    axes.set_xticks(range(len(coordinates)), [coordinate.title for coordinate in coordinates], fontsize=8.5)
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(coordinates) - 0.6)
    axes.set_ylim(-0.06, 1.06)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _line(axes: Axes, coordinates: Sequence[Coordinate], trial: TrialRecord, part: int = 0, **style: Any) -> None:
    crossed = [(x, one.places[trial.number]) for x, one in enumerate(coordinates) if trial.number in one.places]
    (line,) = axes.plot(*zip(*crossed, strict=True), solid_joinstyle="round", **style)
    is_trial(line, trial.number, part)


def _parameters(data: SweepData, trials: Sequence[TrialRecord]) -> list[Coordinate]:
    found = []
    for name in dict.fromkeys(name for trial in trials for name in trial.params):
        values = {trial.number: trial.params[name] for trial in trials if name in trial.params}
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values()):
            found.append(numeric_axis(name, values, log=name in data.log_parameters))
        else:
            found.append(choice_axis(name, values))
    return found


def _metrics(data: SweepData, trials: Sequence[TrialRecord]) -> list[Coordinate]:
    found = []
    for place, name in enumerate(data.goal.metrics):
        values = {trial.number: trial.values[place] for trial in trials if trial.values}
        low, high = min(values.values()), max(values.values())
        found.append(numeric_axis(name, values, log=low > 0 and high > 20 * low))
    return found


def numeric_axis(title: str, values: Mapping[int, float], *, log: bool) -> Coordinate:
    """The axis of a numeric parameter or metric."""

    def bent(number: float) -> float:
        return math.log10(number) if log else float(number)

    distinct = sorted(set(values.values()))
    low, width = bent(distinct[0]), bent(distinct[-1]) - bent(distinct[0])

    def at(number: float) -> float:
        return 0.5 if width == 0 else (bent(number) - low) / width

    if len(distinct) <= FEW_VALUES:
        ticks = [(at(number), shown(number)) for number in distinct]
    else:
        marks = [low + width * part / 4 for part in range(5)]
        ticks = [((mark - low) / width, shown(float(10**mark if log else mark))) for mark in marks]
    return Coordinate(title=title, places={number: at(value) for number, value in values.items()}, ticks=ticks)


def choice_axis(title: str, values: Mapping[int, Any]) -> Coordinate:
    """The axis of a categorical parameter, with its values in alphabetical order."""
    texts = sorted({_text(value) for value in values.values()})
    places = {text: 0.5 if len(texts) == 1 else index / (len(texts) - 1) for index, text in enumerate(texts)}
    every = -(-len(texts) // MOST_TICKS)
    return Coordinate(
        title=title,
        places={number: places[_text(value)] for number, value in values.items()},
        ticks=[(places[text], text) for text in texts[::every]],
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
