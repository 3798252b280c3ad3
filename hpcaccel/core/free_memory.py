"""Memory that is left for this process, within the limits of the machine and of its cgroups."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_bytes"]


def available_bytes() -> int | None:
    """Memory in bytes that this process can still use within the limits of the machine and of its cgroups; None if
    unknown."""
    found = []
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            found.append(1024 * int(line.split()[1]))
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _left_in(Path("/sys/fs/cgroup"), path, limit="memory.max", used="memory.current")
        elif "memory" in controllers.split(","):
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
            found += _left_in(Path("/sys/fs/cgroup/memory"), path, limit=limit, used=used)
    return min(found, default=None)


def _left_in(root: Path, path: str, *, limit: str, used: str) -> list[int]:
    """Free bytes below the limit of each cgroup from ``path`` to the root. Inactive file cache counts as free."""
    found = []
    place = root / path.lstrip("/")
    for group in [place, *place.parents]:
        most, now = _lines(group / limit), _lines(group / used)
        if most and now and most[0].isdigit():
            statistics = dict(line.split() for line in _lines(group / "memory.stat"))
            found.append(int(most[0]) - int(now[0]) + int(statistics.get("inactive_file", 0)))
        if group == root:
            break
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
