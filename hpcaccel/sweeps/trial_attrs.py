"""What we note of a trial beside Optuna's own: user attributes in the journal, written together with the trial.

Most trials are drawn: their point is the next one of the method's. The others were made for a point that is known:
further seeds of it, and what the commands put in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "CHECKPOINT",
    "FROM",
    "ORIGIN",
    "POINT",
    "REPEAT",
    "SETTINGS",
    "SURPLUS",
    "is_drawn",
    "is_extended",
    "is_surplus",
    "point_number",
    "repeat_number",
]

POINT = "point"
"""The number of the trial for which the point was drawn; not there in that trial itself."""

REPEAT = "repeat"
"""Which of the point's trials, counted from 0; it decides the seed."""

ORIGIN = "origin"
"""Why a trial was made that was not drawn: ``repeat``, ``retry``, ``extend`` or ``budget``. No drawn trial has it."""

SURPLUS = "surplus"
"""Why a trial that was drawn was given back. It never ran, and is neither counted nor shown."""


FROM = "from"
"""The number of the trial that this one goes on from, where a command put it in."""

CHECKPOINT = "checkpoint"
"""The checkpoint that it begins with, a path in the sweep's directory; not there where there was none."""

SETTINGS = "set"
"""What it has of its own beside the point, such as ``["args.epochs=20"]``."""


def point_number(number: int, user_attrs: Mapping[str, Any]) -> int:
    """What all trials of one point have in common."""
    return int(user_attrs.get(POINT, number))


def repeat_number(user_attrs: Mapping[str, Any]) -> int:
    """Which of its point's trials this is, counted from 0."""
    return int(user_attrs.get(REPEAT, 0))


def is_surplus(user_attrs: Mapping[str, Any]) -> bool:
    """Whether a trial was given back before it ran."""
    return SURPLUS in user_attrs


def is_extended(user_attrs: Mapping[str, Any]) -> bool:
    """Whether somebody wants this trial to come further than it, or another one, has: it is not ended early."""
    return user_attrs.get(ORIGIN) == "extend"


def is_drawn(user_attrs: Mapping[str, Any]) -> bool:
    """Whether a trial's point was the next one of the method's, and it was not given back."""
    return ORIGIN not in user_attrs and SURPLUS not in user_attrs
