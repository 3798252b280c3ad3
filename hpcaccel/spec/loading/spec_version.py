"""The version of the format of spec files (``spec_version``), and keys that were renamed in it.

A release that renames a key adds a row to ``RENAMED``: the old key is read as the new one, with a warning. The next
but one release removes the row, and names the new key in ``moved`` of the key's section, so that the old one is an
error with the key to write instead. ``docs/versions.md`` has the policy for users.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import hpcaccel
from hpcaccel.core.progress_notes import show_note_once
from hpcaccel.errors import SpecError
from hpcaccel.spec.yaml12 import KeyPath, PlainScalar, Problem, SourceLocation

__all__ = ["KEY", "RENAMED", "SPEC_VERSION", "Renamed", "to_current"]

KEY = "spec_version"
SPEC_VERSION = 1
"""The newest format that this release reads. A file without the key is of this format."""


class Renamed(NamedTuple):
    """A key that has another name now."""

    old: str
    """With its sections: ``resilience.hang_timeout``."""
    new: str
    since: str
    """The release that renamed it."""
    removed: str
    """The release that no longer reads the old key."""


RENAMED: tuple[Renamed, ...] = ()
"""None yet: no release has renamed a key."""


def to_current(
    values: dict[str, Any], places: Mapping[KeyPath, SourceLocation], shown: str
) -> tuple[dict[str, Any], dict[KeyPath, SourceLocation], list[Problem]]:
    """Settings of a file in the current format.

    Args:
        values: the file's settings; they are not changed.
        places: the location of each.
        shown: the file's name in messages.

    Returns:
        The settings under their current names and without ``spec_version``, their locations, and a problem for each
        setting that is given under its old and its new name.

    Raises:
        SpecError: the file's version is newer than ``SPEC_VERSION``, or is no version.
    """
    _check_version(values, places, shown)
    values = {key: value for key, value in values.items() if key != KEY}
    located = {path: place for path, place in places.items() if path != (KEY,)}
    problems: list[Problem] = []
    if not RENAMED:
        return values, located, problems
    jobs = values.get("jobs")
    for start in ((), *(("jobs", name) for name in (jobs if isinstance(jobs, Mapping) else ()))):
        for one in RENAMED:
            values, located = _renamed(values, located, one, start, shown, problems)
    return values, located, problems


def _check_version(values: Mapping[str, Any], places: Mapping[KeyPath, SourceLocation], shown: str) -> None:
    if KEY not in values:
        return
    place = places.get((KEY,), SourceLocation(shown))
    given = values[KEY]
    version = given.value if isinstance(given, PlainScalar) else given
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise SpecError(f"{place}: {KEY} {_text(given)!r} is not a version: write {KEY}: {SPEC_VERSION}, or remove it")
    if version > SPEC_VERSION:
        raise SpecError(
            f"{place}: {KEY} {version} needs a newer hpcaccel: this one ({hpcaccel.__version__}) reads versions up to "
            f"{SPEC_VERSION}. Upgrade it: pip install --upgrade hpcaccel"
        )


def _text(value: Any) -> str:
    return value.text if isinstance(value, PlainScalar) else str(value)


def _renamed(
    values: dict[str, Any],
    places: dict[KeyPath, SourceLocation],
    one: Renamed,
    start: KeyPath,
    shown: str,
    problems: list[Problem],
) -> tuple[dict[str, Any], dict[KeyPath, SourceLocation]]:
    """``values`` and ``places`` with one key under its new name, in the part of the file below ``start``."""
    old: KeyPath = (*start, *one.old.split("."))
    new: KeyPath = (*start, *one.new.split("."))
    if (found := list(_at(values, old))) == []:
        return values, places
    place = places.get(old, SourceLocation(shown))
    if list(_at(values, new)):
        problems.append(Problem(place, f"{one.old} is the old name of {one.new}, which is set too: remove {one.old}"))
        return _without(values, old), places
    show_note_once(
        f"{place}: {one.old} is deprecated since hpcaccel {one.since}, and {one.removed} no longer reads it: write "
        f"{one.new}",
        of=(KEY, str(place), one.old),
    )
    values = _with(_without(values, old), new, found[0])
    length = len(old)
    return values, {(*new, *path[length:]) if path[:length] == old else path: at for path, at in places.items()}


def _at(values: Any, path: KeyPath) -> Iterator[Any]:
    """The value at ``path``, if there is one."""
    for key in path:
        if not isinstance(values, Mapping) or key not in values:
            return
        values = values[key]
    yield values


def _without(values: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    head = str(path[0])
    if len(path) == 1:
        return {key: value for key, value in values.items() if key != head}
    return {**values, head: _without(values[head], path[1:])}


def _with(values: dict[str, Any], path: KeyPath, value: Any) -> dict[str, Any]:
    head = str(path[0])
    if len(path) == 1:
        return {**values, head: value}
    below = values.get(head)
    return {**values, head: _with(dict(below) if isinstance(below, Mapping) else {}, path[1:], value)}
