"""Changes between two runs of one name, as lines of text."""

from __future__ import annotations

from hpcaccel.core.formatting import clean, clock_time
from hpcaccel.submission.submit.comparison import Changes

__all__ = ["change_lines"]


def change_lines(found: Changes) -> list[str]:
    """The changed settings, the names of changed files, and the difference of their text."""
    lines = [f"changed since {found.run_id} ({clock_time(found.created)}):"]
    lines += [f"  {one.key}: {clean(_shown(one.before))} -> {clean(_shown(one.now))}" for one in found.settings]
    for names, what in ((found.added, "added"), (found.removed, "removed"), (found.changed, "changed")):
        lines += [f"  {what}: {clean(name)}" for name in names]
    if found.code != "compared":
        lines.append(f"  {found.code}")
    elif found.nothing:
        lines.append("  no changes")
    return [*lines, *(clean(line) for line in found.diff.splitlines())]


def _shown(value: object) -> str:
    return "(not set)" if value is None else str(value)
