"""Numbers of nodes as sbatch takes them: ``4``, ``2-4``, or a list of sizes such as ``1,2,4-8:2``.

``canonical_nodes`` checks text; its ValueErrors complete a sentence that begins with the key and the value. The other
functions parse canonical text.
"""

from __future__ import annotations

import re

__all__ = ["canonical_nodes", "more_nodes", "node_range", "node_sizes"]

_NODES = re.compile(r"(\d+[km]?)(?:-(\d+[km]?)(?::(\d+))?)?", re.ASCII | re.IGNORECASE)
_NODES_WORDS = "is not a number of nodes (allowed: 4, 2-4, or a list of sizes such as 1,2,4-8:2)"


def canonical_nodes(text: str) -> str:
    """A node count: ``4``, ``2-4``, or a list of sizes in sbatch's form, ``1,2,4-8:2``. ``2k`` means 2048."""
    parts = text.split(",")
    canonical = []
    for part in parts:
        match = _NODES.fullmatch(part)
        if match is None or len(part) > 30 or (match[3] is not None and int(match[3]) == 0):
            raise ValueError(_NODES_WORDS)
        low = _count(match[1])
        high = low if match[2] is None else _count(match[2])
        if low < 1 or high < low:
            raise ValueError(_NODES_WORDS)
        step = f":{int(match[3])}" if match[3] else ""
        canonical.append(f"{low}-{high}{step}" if high > low else str(low))
    return ",".join(canonical)


def _count(text: str) -> int:
    scale = {"k": 1024, "m": 1024**2}.get(text[-1].lower(), 1)
    return int(text if scale == 1 else text[:-1]) * scale


def node_range(canonical: str) -> tuple[int, int]:
    """Returns the smallest and the largest number of nodes that a canonical node count allows."""
    numbers = [int(number) for part in canonical.split(",") for number in part.partition(":")[0].split("-")]
    return min(numbers), max(numbers)


def node_sizes(canonical: str) -> list[list[int]]:
    """The sizes that a canonical node count allows, as ranges of a smallest size, a largest one, and a step."""
    found = []
    for part in canonical.split(","):
        sizes, _, step = part.partition(":")
        low, _, high = sizes.partition("-")
        found.append([int(low), int(high or low), int(step or 1)])
    return found


def more_nodes(canonical: str, number: int) -> str:
    """A canonical node count with ``number`` nodes more in each of its sizes."""

    def larger(part: str) -> str:
        sizes, colon, step = part.partition(":")
        return "-".join(str(int(size) + number) for size in sizes.split("-")) + colon + step

    return ",".join(map(larger, canonical.split(",")))
