"""Memory, times, node counts and GPUs in every form that sbatch takes, each turned into one canonical form.

Every ``canonical_…`` takes what the user wrote (text or a whole number), returns text that sbatch takes, is its own
fixed point, and raises ValueError with words that continue "<key> <value> …". The functions after it read the
canonical text. Forms: https://slurm.schedmd.com/sbatch.html.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import ceil

__all__ = [
    "UNLIMITED",
    "canonical_gpus",
    "canonical_gres",
    "canonical_memory",
    "canonical_nodes",
    "canonical_time",
    "gpu_count",
    "gres_gpus",
    "memory_megabytes",
    "node_range",
    "time_seconds",
]

UNLIMITED = "UNLIMITED"

# -- times ----------------------------------------------------------------------------------------------------------

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+)(?::(?P<ds>\d+))?)?"
    r"|(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+)"
    r"|(?P<m>\d+)(?::(?P<ms>\d+))?)",
    re.ASCII,
)
_NO_LIMIT = {"unlimited", "infinite", "-1"}


def canonical_time(text: str) -> str:
    """``[D-]HH:MM:SS`` or ``UNLIMITED``. A bare number is minutes; 0 is no limit, as sbatch has it."""
    if text.lower() in _NO_LIMIT:
        return UNLIMITED
    match = _TIME.fullmatch(text)
    if match is None or len(text) > 30:
        raise ValueError(
            "is not a time (allowed: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, "
            "days-hours:minutes:seconds, UNLIMITED)"
        )
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    minutes = (part["days"] * 24 + part["dh"] + part["h"]) * 60 + part["dm"] + part["hm"] + part["m"]
    seconds = minutes * 60 + part["ds"] + part["hs"] + part["ms"]
    if seconds == 0:
        return UNLIMITED
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def time_seconds(canonical: str) -> int | None:
    """Seconds of a canonical time, None for no limit."""
    if canonical == UNLIMITED:
        return None
    days, _, clock = canonical.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


# -- memory ---------------------------------------------------------------------------------------------------------

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)(?:([KMGT])(?:i?B)?)?", re.ASCII | re.IGNORECASE)
_MEGABYTES = {"K": Fraction(1, 1024), "M": Fraction(1), "G": Fraction(1024), "T": Fraction(1024**2)}


def canonical_memory(text: str) -> str:
    """The largest whole unit (``40G``, ``1500M``, ``0``). A bare number is megabytes; parts of one are rounded up."""
    match = _MEMORY.fullmatch(text)
    if match is None or len(text) > 30:
        raise ValueError(
            "is not a memory size (allowed: a number and K, M, G or T, such as 40G; without a letter megabytes)"
        )
    megabytes = ceil(Fraction(match[1]) * _MEGABYTES[(match[2] or "M").upper()])
    if megabytes == 0:
        return "0"
    for unit, size in (("T", 1024**2), ("G", 1024)):
        if megabytes % size == 0:
            return f"{megabytes // size}{unit}"
    return f"{megabytes}M"


def memory_megabytes(canonical: str) -> int:
    """Megabytes (2**20 bytes) of a canonical memory size; 0 stands for all of a node's."""
    if canonical == "0":
        return 0
    return int(canonical[:-1]) * int(_MEGABYTES[canonical[-1]])


# -- nodes ----------------------------------------------------------------------------------------------------------

_NODES = re.compile(r"(\d+[km]?)(?:-(\d+[km]?)(?::(\d+))?)?", re.ASCII | re.IGNORECASE)
_NODES_WORDS = "is not a number of nodes (allowed: 4, 2-4, or a list of sizes such as 1,2,4-8:2)"


def canonical_nodes(text: str) -> str:
    """``4``, ``2-4`` or sbatch's list of sizes ``1,2,4-8:2``; ``2k`` is 2048."""
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
    """The fewest and the most nodes that a canonical node count allows."""
    numbers = [int(number) for part in canonical.split(",") for number in part.partition(":")[0].split("-")]
    return min(numbers), max(numbers)


# -- GPUs and other generic resources -------------------------------------------------------------------------------

_GPUS = re.compile(r"(?:([\w.-]+):)?(\d+)", re.ASCII)
_GRES_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_GRES_TYPE = re.compile(r"[\w.-]+", re.ASCII)
_GRES_COUNT = re.compile(r"\d+[kmgtp]?", re.ASCII | re.IGNORECASE)


def canonical_gpus(text: str) -> str:
    """``2``, ``a100:2`` or ``a100:2,v100:1``, as ``--gpus-per-node`` and its like take them."""
    canonical = []
    for part in text.split(","):
        match = _GPUS.fullmatch(part.strip())
        if match is None or len(part) > 100:
            raise ValueError("is not a number of GPUs (allowed: 2, or type:number such as a100:2)")
        if int(match[2]) > 9999:
            raise ValueError("is not a number of GPUs that a job can have (at most 9999)")
        kind = f"{match[1]}:" if match[1] else ""
        canonical.append(f"{kind}{int(match[2])}")
    return ",".join(canonical)


def gpu_count(canonical: str) -> int:
    """How many GPUs a canonical GPU request asks for."""
    return sum(int(part.rpartition(":")[2]) for part in canonical.split(","))


def canonical_gres(text: str) -> str:
    """``gpu:a100:2,shard:1``: every resource as name[:type]:count, with the count written out."""
    if text.lower() == "none":
        return "none"
    return ",".join(_resource(part.strip().removeprefix("gres:")) for part in text.split(","))


def _resource(text: str) -> str:
    name, *rest = text.split(":")
    count = rest.pop() if rest and _GRES_COUNT.fullmatch(rest[-1]) else "1"
    valid = _GRES_NAME.fullmatch(name) and len(rest) <= 1 and all(_GRES_TYPE.fullmatch(kind) for kind in rest)
    if not valid or len(text) > 100:
        raise ValueError(
            "is not a list of generic resources (allowed: name, name:count, name:type:count, such as gpu:a100:2)"
        )
    return ":".join([name, *rest, count])


def gres_gpus(canonical: str) -> int:
    """How many GPUs (not shards of them) a canonical gres list asks for."""
    parts = [part.split(":") for part in canonical.split(",")]
    return sum(int(part[-1]) for part in parts if part[0] == "gpu" and part[-1].isdigit())
