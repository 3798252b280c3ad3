"""Lists in Slurm's compact notation: hosts, tasks per node, array indices, and ranks in messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product

__all__ = ["array_indices", "compress", "expand", "ranks_text", "tasks_per_node"]


def expand(hostlist: str) -> list[str]:
    """``n[001-003,7],rack[1-2]n[01-02]`` → every host, in Slurm's order.

    Raises:
        ValueError: unbalanced brackets or an invalid range.
    """
    hosts: list[str] = []
    for item in _split_outside_brackets(hostlist.strip()):
        pieces = re.split(r"\[([^\[\]]*)\]", item)
        if any("[" in piece or "]" in piece for piece in pieces):
            raise ValueError(f"host list {hostlist!r}: brackets do not match in {item!r}")
        choices = [[piece] if i % 2 == 0 else list(_ranges(piece, hostlist)) for i, piece in enumerate(pieces)]
        hosts += ["".join(parts) for parts in product(*choices)]
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    return [item for item in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text) if item]


def _ranges(text: str, whole: str) -> Iterator[str]:
    """``001-003,7`` → 001 002 003 7; leading zeros set the width."""
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item.strip())
        if not match:
            raise ValueError(f"host list {whole!r}: {item!r} is not a number or a range such as 01-16")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"host list {whole!r}: the range {item!r} ends before it begins")
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def compress(hosts: Iterable[str]) -> str:
    """Hosts in compact form, e.g. ``n[1-3,7]``: groups in order of appearance, each sorted."""
    groups: dict[tuple[str, int, str], list[int]] = {}
    for host in dict.fromkeys(hosts):
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", host)
        if match is None:
            groups.setdefault((host, -1, ""), [])
            continue
        prefix, digits, suffix = match.groups()
        # n9 and n10 share a group; n09 and n9 do not: they are different hosts
        width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
        padded = (prefix, len(digits), suffix)
        key = padded if width or padded in groups else (prefix, 0, suffix)
        groups.setdefault(key, []).append(int(digits))
    return ",".join(_group_text(*key, numbers) for key, numbers in groups.items())


def _group_text(prefix: str, width: int, suffix: str, numbers: list[int]) -> str:
    if width < 0:
        return prefix
    inner = ",".join(_ranges_of(numbers, width))
    return f"{prefix}{inner}{suffix}" if inner.isdigit() else f"{prefix}[{inner}]{suffix}"


def _ranges_of(numbers: Iterable[int], width: int = 0) -> Iterator[str]:
    """Ranges of the sorted, distinct numbers: ``0``, ``2-5``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    for run in runs:
        first, last = str(run[0]).zfill(width), str(run[-1]).zfill(width)
        yield first if len(run) == 1 else f"{first}-{last}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in a message: ``rank 3``, or ``ranks 0, 2-5``."""
    ranks = set(ranks)
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(_ranges_of(ranks))}"


def tasks_per_node(text: str) -> list[int]:
    """``4(x2),3`` (SLURM_TASKS_PER_NODE) → [4, 4, 3].

    Raises:
        ValueError: the text does not have this form.
    """
    counts: list[int] = []
    for item in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if not match:
            raise ValueError(f"tasks per node {text!r}: {item!r} is not of the form 4 or 4(x2)")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def array_indices(text: str) -> list[int]:
    """The indices in an array's list: ``1-5%2`` → [1, 2, 3, 4, 5], ``0,2-8:2`` → [0, 2, 4, 6, 8].

    Raises:
        ValueError: the text does not have this form. Slurm truncates very long lists with ``...``.
    """
    indices: list[int] = []
    for item in text.strip().strip("[]").partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", item)
        if not match:
            raise ValueError(f"array indices {text!r}: {item!r} is not a number or a range such as 0-7")
        indices += range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
    return indices
