"""The results that the ranks of a self-test have written: one record per process, and what each of its checks found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import objects_in

__all__ = ["CheckResult", "RankResults", "SelftestResults", "read_results"]

KEYS = {"selftest", "rank", "node", "pid", "check", "state", "time"}
ENDED = {"ok", "failed", "timeout", "skipped"}


@dataclass
class CheckResult:
    """One check of one rank. ``state`` is ``began`` if the process ended in it."""

    state: str = "began"
    steps: int = 0
    last_step: str = ""
    seconds: float = 0.0
    faults: Sequence[Mapping[str, Any]] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""


@dataclass
class RankResults:
    """The results that one process wrote. ``rank`` is None if its environment does not name one."""

    rank: int | None
    node: str
    pid: int
    checks: dict[str, CheckResult] = field(default_factory=dict)
    end: str = ""
    """By which signal the process was killed, if that is known."""

    @property
    def is_over(self) -> bool:
        """Whether the process ended by itself: after the last check, or because a check exceeded its time limit."""
        return "end" in self.checks or any(check.state == "timeout" for check in self.checks.values())

    @property
    def open_check(self) -> str | None:
        """The check that the process was in when it ended."""
        return next((name for name, check in self.checks.items() if check.state == "began"), None)

    def data(self, check: str, key: str, default: Any = None) -> Any:
        """A measurement of a check."""
        found = self.checks.get(check)
        return default if found is None else found.data.get(key, default)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add one line of the results."""
        if line["state"] == "killed":
            self.end = str(line.get("message", ""))
            return
        check = self.checks.setdefault(str(line["check"]), CheckResult())
        if line["state"] == "step":
            check.steps += 1
            check.last_step = str(line.get("message", ""))
        elif line["state"] in ENDED:
            check.state = str(line["state"])
            check.seconds = float(line.get("seconds", 0.0))
            check.faults = line.get("faults", ())
            check.data = line.get("data", {})
            check.message = str(line.get("message", ""))


@dataclass(frozen=True)
class SelftestResults:
    """The results of all processes, and where the ranks should have run."""

    processes: Sequence[RankResults]
    world_size: int
    places: Mapping[int, str]
    """The node of each rank, as far as it is known."""
    expected: int | None = None
    """The number of ranks that were started; None if unknown."""

    @property
    def missing(self) -> list[int]:
        """Ranks that left no result."""
        return sorted(set(range(self.world_size)) - {one.rank for one in self.processes if one.rank is not None})

    def node_of(self, rank: int) -> str:
        """The name of a rank's node, or ``rank N`` if its node is unknown."""
        return self.places.get(rank, f"(node of rank {rank})")


def read_results(
    folder: Path, *, outputs: Iterable[str] = (), expected: int | None = None, places: Sequence[str] = ()
) -> SelftestResults:
    """Read the results of a self-test.

    Args:
        folder: the folder with the ranks' files; it may be missing.
        outputs: outputs of the ranks. Ranks that could not write their file have printed their results.
        expected: the number of ranks that were started; by default, the world size in most ranks' environment.
        places: the node of each rank, if known to the launcher.
    """
    processes: dict[tuple[str, int], RankResults] = {}
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("rank-*.jsonl"))]
    lines = [line for text in [*texts, *outputs] for line in objects_in(text, keys=KEYS)]
    for line in sorted(lines, key=lambda line: float(line["time"])):
        key = str(line["node"]), int(line["pid"])
        process = processes.setdefault(key, RankResults(None, *key))
        process.rank = line["rank"] if isinstance(line["rank"], int) else process.rank
        process.add(line)
    found = list(processes.values())
    sizes = Counter(size for one in found if (size := one.data("environment", "world_size")) is not None)
    world_size = expected or max((size for size, count in sizes.items() if count == max(sizes.values())), default=0)
    return SelftestResults(found, world_size, _places(found, world_size, places), expected)


def _places(processes: Sequence[RankResults], world_size: int, known: Sequence[str]) -> dict[int, str]:
    listed = known or next((places for one in processes if (places := one.data("environment", "places"))), [])
    places = dict(enumerate(listed)) if len(listed) == world_size else {}
    seen = {one.rank: one.node for one in processes if one.rank is not None}
    return seen | places  # a process may have the number of another rank
