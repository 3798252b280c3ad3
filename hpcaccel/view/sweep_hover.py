"""Which trial a line or a point of a drawing is: told by the browser where the mouse rests on it, without a script.

matplotlib writes an artist's ``gid`` as the id of its group. Behind the drawing each such group, or each of its points,
is given an SVG ``title``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.view.sweep_data import SweepData, shown

__all__ = ["are_trials", "is_trial", "with_titles"]

_LINE, _POINTS = "trial", "trials"
_GROUP = re.compile(r'<g id="(?:[a-z]+-)?(trials?)-([0-9_]+)">')


def is_trial(artist: Any, number: int, part: int = 0) -> None:
    """``artist`` is a line of trial ``number``; of several in one drawing each has another ``part``."""
    artist.set_gid(f"{_LINE}-{number}_{part}")


def are_trials(artist: Any, place: int) -> None:
    """``artist`` holds a point for each trial of the list ``place`` that ``with_titles`` is given."""
    artist.set_gid(f"{_POINTS}-{place}")


def with_titles(text: str, data: SweepData, points: Sequence[Sequence[TrialRecord]]) -> str:
    """``text``, an SVG, with a title for each trial in it."""
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
    """Where the group ends whose content begins at ``begin``."""
    depth = 1
    for tag in re.finditer(r"<g[ >]|</g>", text[begin:]):
        depth += 1 if tag[0] != "</g>" else -1
        if not depth:
            return begin + tag.start()
    return len(text)


def _points(group: str, titles: Sequence[str]) -> str:
    marks = re.findall(r"<use [^>]*/>", group)
    if len(marks) != len(titles):
        return group  # another matplotlib writes points in another way: they have no titles then
    left = iter(titles)
    return re.sub(r"<use ([^>]*)/>", lambda mark: f"<use {mark[1]}>{next(left)}</use>", group)


def _title(trial: TrialRecord, data: SweepData) -> str:
    values = [f"{name} {value:.5g}" for name, value in zip(data.goal.metrics, trial.values or (), strict=False)]
    params = [f"{path} = {shown(value)}" for path, value in trial.params.items()]
    lines = "\n".join([f"trial {trial.number}, {trial.state}", *values, *params])
    return f"<title>{escape(lines)}</title>"
