"""Masking of ``environment.secrets`` in text that hpcaccel writes, such as an exception of the program."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.run_dir import RunDir

__all__ = ["MASKED", "Mask"]

MASKED = "***"
SHORTEST = 4
"""Minimum length in characters of a masked value. Shorter values also occur in ordinary words."""
SHORTEST_LINE = 8
"""Each line of a multi-line value is masked too if it has at least this many characters."""


class Mask:
    """Replaces secret values in a text by ``***``.

    Args:
        values: the secrets.
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
        """A run's mask: names from its spec, values from this process's environment."""
        spec = (read_json(run.spec) or {}).get("spec", {})
        names = (spec.get("environment") or {}).get("secrets") or []
        return cls(env[name] for name in names if name in env)

    def __call__(self, text: str) -> str:
        if self._pattern is None:
            return text
        text = self._pattern.sub(MASKED, text)
        # Truncated text may end in the middle of a value.
        for part in self._parts:
            for length in range(len(part) - 1, SHORTEST - 1, -1):
                if text.endswith(part[:length]):
                    return text[:-length] + MASKED
        return text
