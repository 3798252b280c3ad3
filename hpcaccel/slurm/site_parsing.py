"""What Slurm prints about a site, as plain keys and values: partitions, nodes, accounts, QOS. Tried on 22.05 to 26.11.

Keys are Slurm's own. Versions add and rename some, so that nothing here expects a key to be there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcaccel.slurm.states import parse_duration

__all__ = ["count", "first", "gres", "knows_containers", "listed", "minutes", "records", "seconds", "table", "tres"]

_PAIR = re.compile(r"(?:^|\s)(?=[A-Z][A-Za-z_/]*=)")
_NOTHING = frozenset({"", "(null)", "N/A", "n/s", "NONE", "None"})
_ENDLESS = frozenset({"UNLIMITED", "INFINITE", "NOT_SET", "-1", "4294967295"})
_SCALES = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def records(text: str, key: str) -> list[dict[str, str]]:
    """The blocks or lines of ``scontrol show partition`` (``key`` is PartitionName) or ``show node`` (NodeName).

    A key that comes twice keeps its first value: free texts (Reason, Comment) stand last and may hold anything.
    """
    found: list[dict[str, str]] = []
    for line in text.split("\n"):
        stripped = line.strip()
        if stripped.startswith(f"{key}="):
            found.append({})
        if not found or "=" not in stripped:
            continue
        for pair in _PAIR.split(stripped):
            name, equals, value = pair.partition("=")
            if equals:
                found[-1].setdefault(name, value.strip())
    return found


def table(text: str) -> list[dict[str, str]]:
    """The rows of ``sacctmgr --parsable2 show …``, by the names of its first line."""
    lines = [line.split("|") for line in text.split("\n") if "|" in line]
    if not lines:
        return []
    head, *rows = lines
    return [dict(zip(head, row, strict=False)) for row in rows if len(row) >= len(head)]


def listed(text: str | None) -> list[str]:
    """``a,b`` → [a, b]; [] for (null) and the like."""
    if text is None or text in _NOTHING:
        return []
    return [item.strip() for item in text.split(",") if item.strip()]


def seconds(text: str | None) -> int | None:
    """Seconds of ``30 sec``, ``2 min``, ``1-00:00:00``; None for no limit, nothing, or what is no duration."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)\s*(sec|min|hour|day)s?", text.strip())
    if match:
        return int(match[1]) * {"sec": 1, "min": 60, "hour": 3600, "day": 86400}[match[2]]
    return parse_duration(text) if ":" in text or "-" in text else None


def minutes(text: str | None) -> int | None:
    """Minutes of a limit (``1-00:00:00``, ``30`` minutes, ``5 min``); None for UNLIMITED, NONE, nothing."""
    if text is None:
        return None
    if text.strip().isdigit():
        return int(text)
    found = seconds(text)
    return None if found is None else found // 60


def count(text: str | None) -> int | None:
    """A whole number, ``20000M`` and ``750G`` in megabytes; None for UNLIMITED, N/A, nothing."""
    if text is None or text.strip() in _ENDLESS:
        return None
    match = re.match(r"(\d+)([MGT]?)", text.strip())
    return int(match[1]) * {"": 1, "M": 1, "G": 1024, "T": 1024**2}[match[2]] if match else None


def tres(text: str | None) -> dict[str, str]:
    """``cpu=4,gres/gpu=16`` → {"cpu": "4", "gres/gpu": "16"}."""
    pairs = (item.partition("=") for item in listed(text))
    return {name: value for name, equals, value in pairs if equals}


def gres(text: str | None) -> tuple[dict[str, int], list[str]]:
    """``gpu:a100:4(S:0-1),gpu:1,nvme:2`` → ({"a100": 4, "gpu": 1}, ["nvme:2"]); gpu is a GPU without a type."""
    gpus: dict[str, int] = {}
    others: list[str] = []
    for item in listed(re.sub(r"\([^)]*\)", "", text or "")):
        name, *rest = item.split(":")
        if name != "gpu":
            others.append(item)
            continue
        amount = rest.pop() if rest and re.fullmatch(r"\d+[KMGT]?", rest[-1]) else "1"
        kind = rest[0] if rest else "gpu"
        number, scale = re.fullmatch(r"(\d+)([KMGT]?)", amount).groups()  # type: ignore[union-attr]
        gpus[kind] = gpus.get(kind, 0) + int(number) * _SCALES[scale]
    return gpus, others


def knows_containers(help_text: str) -> bool:
    """Whether ``srun --help`` names --container-image: pyxis is there (https://github.com/NVIDIA/pyxis)."""
    return "--container-image" in help_text


def first(row: Mapping[str, str], *names: str) -> str:
    """The first of these columns that says something; sacctmgr's headings differ (``Def QOS``, ``DefaultQOS``)."""
    return next((row[name] for name in names if row.get(name, "") not in _NOTHING), "")
