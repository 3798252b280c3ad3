"""Values of ``environment.secrets``, replaced in what we write ourselves: an exception of the program may hold one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from hpcaccel.core.run_dir import RunDir, read_json

__all__ = ["MASKED", "Mask"]

MASKED = "***"
SHORTEST = 4
"""Characters: a shorter value is a part of too many other words."""
SHORTEST_LINE = 8
"""Of a value of several lines each line is masked as well, from this length on."""


class Mask:
    """Replaces each secret value in a text.

    Args:
        values: to be replaced; the longest first, since one may hold another.
    """

    def __init__(self, values: Iterable[str]) -> None:
        whole = {value.strip() for value in values}
        lines = {line.strip() for value in whole if "\n" in value for line in value.splitlines()}
        parts = [value for value in whole if len(value) >= SHORTEST]
        parts += [line for line in lines if len(line) >= SHORTEST_LINE]
        found = sorted(parts, key=len, reverse=True)
        self._parts = found
        self._pattern = re.compile("|".join(map(re.escape, found))) if found else None

    @classmethod
    def of(cls, run: RunDir, env: Mapping[str, str] = os.environ) -> Mask:
        """For a run, by the names in its spec; the values are in this process's environment."""
        spec = (read_json(run.spec) or {}).get("spec", {})
        names = (spec.get("environment") or {}).get("secrets") or []
        return cls(env[name] for name in names if name in env)

    def __call__(self, text: str) -> str:
        if self._pattern is None:
            return text
        text = self._pattern.sub(MASKED, text)
        # What was cut to a length may end in the middle of a value.
        for part in self._parts:
            for length in range(len(part) - 1, SHORTEST - 1, -1):
                if text.endswith(part[:length]):
                    return text[:-length] + MASKED
        return text
