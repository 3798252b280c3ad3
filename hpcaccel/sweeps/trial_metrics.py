"""Following one trial: what its program logs, over all attempts, each step once."""

from __future__ import annotations

from collections.abc import Sequence

from hpcaccel.core.metrics_reader import Line, Logged
from hpcaccel.core.run_dir import RunDir

__all__ = ["Follower"]

SHOWN_NAMES = 12


class Follower:
    """The metrics ``names`` of one trial, read a little at a time.

    What an attempt does again after a resume is not told again; where it comes to another value, ``last`` knows it.
    """

    def __init__(self, run: RunDir, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.last: dict[str, tuple[int, float]] = {}
        """The value that was logged last, with its step, for each of the names."""
        self.seen: set[str] = set()
        """All names that the trial has logged numbers for."""
        self.step: int | None = None
        """The largest step that anything was logged for."""
        self._logged = Logged(run)
        self._told: dict[str, int] = {}

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """What is new since the last call, by step: the newest attempt's value of those of the names that came."""
        new: dict[int, dict[str, float]] = {}
        for line in self._logged.read():
            self.seen.update(line.values)
            self.step = line.step if self.step is None else max(line.step, self.step)
            for name, value in self._wanted(line).items():
                self.last[name] = (line.step, value)
                if line.step > self._told.get(name, -1):
                    new.setdefault(line.step, {})[name] = value
        for step, values in new.items():
            for name in values:
                self._told[name] = max(step, self._told.get(name, -1))
        return sorted(new.items())

    def _wanted(self, line: Line) -> dict[str, float]:
        return {name: line.values[name] for name in self.names if name in line.values}

    @property
    def never_logged(self) -> str:
        """Which of the names have not come and what came instead, for people; empty where all have come."""
        missing = [name for name in self.names if name not in self.last]
        if not missing:
            return ""
        many = "metrics" if len(missing) > 1 else "metric"
        said = f"{many} {', '.join(map(repr, missing))} {'were' if len(missing) > 1 else 'was'} never logged"
        for name in missing:
            if name in self._logged.no_numbers:
                return f"{said} as a number: the trial logged {self._logged.no_numbers[name]} for {name!r}"
        warning = f". In $HPCACCEL_METRICS {self._logged.warning}" if self._logged.warning else ""
        return f"{said}; the trial logged: {self._what_came()}{warning}"

    def _what_came(self) -> str:
        names = sorted(self.seen)
        more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        return ", ".join(names[:SHOWN_NAMES]) + more if names else "nothing"
