"""Data and colours of a sweep's plots, and the tooltips that a browser shows.

Tooltips need no script: matplotlib writes an artist's ``gid`` as the id of an SVG group, and this module adds a
``title`` element to each such group, or to each point in the group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from hpcaccel.sweeps.analysis import Importances, Rung
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.results import Goal

__all__ = ["BAD", "BEST", "DIM", "GOOD", "INK", "SweepData", "are_trials", "is_trial", "shown", "with_titles"]

GOOD, DIM, BAD, BEST, INK = "#2a6fbb", "#b9c0c8", "#c8553d", "#e08e0b", "#2f3640"
"""Colours of complete, pruned and failed trials, the best trial, and text: distinguishable for colour-blind people."""


@dataclass(frozen=True, kw_only=True)
class SweepData:
    """The data for all plots of a sweep."""

    goal: Goal
    trials: Sequence[TrialRecord]
    best: TrialRecord | None
    curves: Mapping[int, Sequence[tuple[int, float]]]
    """The first metric by step, for each trial that has a curve."""
    importances: Importances
    rungs: Sequence[Rung]
    log_parameters: frozenset[str] = frozenset()
    """Parameters searched on a logarithmic scale."""
    lines: frozenset[int] = frozenset()
    """Trials drawn as lines. In a large sweep: the best ones and an evenly spaced selection of the rest."""
    points: list[Sequence[TrialRecord]] = field(default_factory=list)
    """The trials of each scatter plot, in the order of the plot's points. ``with_titles`` uses them for tooltips."""

    @property
    def metric(self) -> str:
        return self.goal.metrics[0]

    def with_value(self, *states: str) -> list[TrialRecord]:
        """Trials in one of these states with finite values."""
        return [
            trial
            for trial in self.trials
            if trial.state in states and trial.values and all(map(math.isfinite, trial.values))
        ]


def shown(value: Any) -> str:
    """Text of a value, for an axis, a tooltip or a table."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


_LINE, _POINTS = "trial", "trials"
_GROUP = re.compile(r'<g id="(?:[a-z]+-)?(trials?)-([0-9_]+)">')


def is_trial(artist: Any, number: int, part: int = 0) -> None:
    """Mark ``artist`` as a line of trial ``number``. Several lines of one trial in a plot have different ``part``s."""
    artist.set_gid(f"{_LINE}-{number}_{part}")


def are_trials(artist: Any, place: int) -> None:
    """Mark ``artist`` as a scatter plot of the trials in ``points[place]``; ``points`` is the argument of
    ``with_titles``."""
    artist.set_gid(f"{_POINTS}-{place}")


def with_titles(text: str, data: SweepData, points: Sequence[Sequence[TrialRecord]]) -> str:
    """Add a ``title`` element, which browsers show as a tooltip, to each line and point of a trial in the SVG ``text``.

    Args:
        points: the trials of each scatter plot, in the order of the plot's points.
    """
    names = {trial.number: _title(trial, data) for trial in data.trials}
    found, behind = [], 0
    for match in _GROUP.finditer(text):
        found.append(text[behind : match.end()])
        behind = match.end()
        if match[1] == _LINE:
            found.append(names[int(match[2].partition("_")[0])])
            continue
        end = _end_of_group(text, behind)
        titles = [names[trial.number] for trial in points[int(match[2])]]
        found.append(_points(text[behind:end], titles))
        behind = end
    return "".join([*found, text[behind:]])


def _end_of_group(text: str, begin: int) -> int:
    """Index of the end of the group whose content begins at ``begin``."""
    depth = 1
    for tag in re.finditer(r"<g[ >]|</g>", text[begin:]):
        depth += 1 if tag[0] != "</g>" else -1
        if not depth:
            return begin + tag.start()
    return len(text)


def _points(group: str, titles: Sequence[str]) -> str:
    marks = re.findall(r"<use [^>]*/>", group)
    if len(marks) != len(titles):
        return group  # another version of matplotlib writes points differently: no titles
    left = iter(titles)
    return re.sub(r"<use ([^>]*)/>", lambda mark: f"<use {mark[1]}>{next(left)}</use>", group)


def _title(trial: TrialRecord, data: SweepData) -> str:
    values = [f"{name} {value:.5g}" for name, value in zip(data.goal.metrics, trial.values or (), strict=False)]
    params = [f"{path} = {shown(value)}" for path, value in trial.params.items()]
    lines = "\n".join([f"trial {trial.number}, {trial.state}", *values, *params])
    return f"<title>{escape(lines)}</title>"
