"""Memory, times and GPUs in the forms that sbatch accepts, each converted to a canonical form.

Every ``canonical_…`` function takes the user's text, returns text that sbatch accepts, and is idempotent. The messages
of its ValueErrors complete a sentence that begins with the key and the value. ``time_seconds``, ``memory_megabytes``,
``gpu_count`` and ``gres_gpus`` parse canonical text.
https://slurm.schedmd.com/sbatch.html describes the forms that sbatch accepts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from math import ceil

__all__ = [
    "HETEROGENEOUS",
    "OWNED_FLAGS",
    "UNLIMITED",
    "canonical_gpus",
    "canonical_gres",
    "canonical_memory",
    "canonical_time",
    "extra_advice",
    "format_number",
    "gpu_count",
    "gres_gpus",
    "memory_megabytes",
    "owned_by_srun",
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
    """A time as ``[D-]HH:MM:SS`` or ``UNLIMITED``. A bare number means minutes, and 0 means no limit, as for sbatch."""
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
    """A canonical time in seconds; None if there is no limit."""
    if canonical == UNLIMITED:
        return None
    days, _, clock = canonical.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


# -- memory ---------------------------------------------------------------------------------------------------------

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)(?:([KMGT])(?:i?B)?)?", re.ASCII | re.IGNORECASE)
_MEGABYTES = {"K": Fraction(1, 1024), "M": Fraction(1), "G": Fraction(1024), "T": Fraction(1024**2)}


def canonical_memory(text: str) -> str:
    """A memory size in the largest unit that gives a whole number (``40G``, ``1500M``, ``0``). A bare number means MiB;
    fractions of a MiB are rounded up."""
    match = _MEMORY.fullmatch(text)
    if match is None or len(text) > 30:
        raise ValueError(
            "is not a memory size (allowed: a number with K, M, G or T, such as 40G; without a unit: megabytes)"
        )
    megabytes = ceil(Fraction(match[1]) * _MEGABYTES[(match[2] or "M").upper()])
    if megabytes == 0:
        return "0"
    for unit, size in (("T", 1024**2), ("G", 1024)):
        if megabytes % size == 0:
            return f"{megabytes // size}{unit}"
    return f"{megabytes}M"


def memory_megabytes(canonical: str) -> int:
    """A canonical memory size in MiB (2**20 bytes); 0 means all memory of a node."""
    if canonical == "0":
        return 0
    return int(canonical[:-1]) * int(_MEGABYTES[canonical[-1]])


# -- GPUs and other generic resources -------------------------------------------------------------------------------

_GPUS = re.compile(r"(?:([\w.-]+):)?(\d+)", re.ASCII)
_GRES_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_GRES_TYPE = re.compile(r"[\w.-]+", re.ASCII)
_GRES_COUNT = re.compile(r"\d+[kmgtp]?", re.ASCII | re.IGNORECASE)


def canonical_gpus(text: str) -> str:
    """A GPU request for ``--gpus-per-node`` and similar options: ``2``, ``a100:2`` or ``a100:2,v100:1``."""
    canonical = []
    for part in text.split(","):
        match = _GPUS.fullmatch(part.strip())
        if match is None or len(part) > 100:
            raise ValueError("is not a number of GPUs (allowed: 2, or type:number such as a100:2)")
        if int(match[2]) > 9999:
            raise ValueError("is not a valid number of GPUs (at most 9999)")
        kind = f"{match[1]}:" if match[1] else ""
        canonical.append(f"{kind}{int(match[2])}")
    return ",".join(canonical)


def gpu_count(canonical: str) -> int:
    """The number of GPUs in a canonical GPU request."""
    return sum(int(part.rpartition(":")[2]) for part in canonical.split(","))


def canonical_gres(text: str) -> str:
    """A gres list such as ``gpu:a100:2,shard:1``, with every resource in the form name[:type]:count; or ``none``."""
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
    """The number of GPUs (not shards) in a canonical gres list."""
    parts = [part.split(":") for part in canonical.split(",")]
    return sum(int(part[-1]) for part in parts if part[0] == "gpu" and part[-1].isdigit())


HETEROGENEOUS = (
    "is not supported: to make the job heterogeneous, add the section components, such as "
    "components: {data: {entrypoint: {script: serve.py}, slurm: {partition: cpu, nodes: 2}}}"
)

OWNED_FLAGS = {
    "array": "cannot be set: use `hpcaccel submit --grid`",
    "chdir": "is set by workdir",
    "error": "cannot be set: rank logs are written to the run directory (see `hpcaccel logs`)",
    "export": "is set by environment.env and environment.secrets",
    "export-file": "is set by environment.env and environment.secrets",
    "gpus": "depends on the number of nodes: set slurm.gpus_per_node, slurm.gpus_per_task or slurm.gres",
    "help": "does not submit a job",
    "input": "cannot be set: ranks have no standard input. Pass a path in entrypoint.args",
    "job-name": "is set by name",
    "no-requeue": "is set by resilience.requeue: false",
    "ntasks": "is computed as nodes × ntasks_per_node: set slurm.nodes and slurm.ntasks_per_node",
    "open-mode": "cannot be set: a requeued job always appends to its logs",
    "output": "cannot be set: rank logs are written to the run directory (see `hpcaccel logs`)",
    "parsable": "is set by hpcaccel, which reads the job ID",
    "quiet": "cannot be set: hpcaccel reads the output of sbatch",
    "requeue": "is set by resilience.requeue",
    "signal": "is set by resilience.warning_seconds",
    "test-only": "does not submit a job: use `hpcaccel validate`",
    "usage": "does not submit a job",
    "version": "does not submit a job",
    "wait": "cannot be set: use `hpcaccel submit --wait`",
    "wrap": "cannot be set: set the program in entrypoint",
}
"""sbatch options that cannot be set under ``slurm.extra``: the long name, and a message that follows this name."""

_SRUN_LONG = (
    "error", "export", "gpus", "input", "jobid", "job-name", "kill-on-bad-exit", "label", "nodes", "nodelist", "ntasks",
    "ntasks-per-node", "open-mode", "output", "unbuffered", "wait",
)  # fmt: skip
_SRUN_SHORT = {
    "-e": "error", "-G": "gpus", "-i": "input", "-J": "job-name", "-K": "kill-on-bad-exit", "-l": "label",
    "-N": "nodes", "-n": "ntasks", "-o": "output", "-u": "unbuffered", "-W": "wait", "-w": "nodelist",
}  # fmt: skip


def extra_advice(flag: str, fields: Iterable[str]) -> str | None:
    """Why an option is not allowed under ``slurm.extra``; None if it is allowed. ``fields`` are the section's keys."""
    if flag in ("het-group", "hetjob"):
        return HETEROGENEOUS
    elsewhere = {name.replace("_", "-"): f"is set by slurm.{name}" for name in fields if name != "extra"} | OWNED_FLAGS
    if flag in elsewhere:
        return elsewhere[flag]
    # sbatch accepts any unique abbreviation of a long option: --sig is --signal.
    for name, advice in elsewhere.items():
        if name.startswith(flag):
            return f"is short for {name}, which {advice}"
    return None


def owned_by_srun(word: str) -> str | None:
    """The name of the srun option that hpcaccel sets and that ``word`` (which may be abbreviated) would override; None
    if ``word`` overrides no such option."""
    if not word.startswith("--"):
        return _SRUN_SHORT.get(word[:2])
    flag = word[2:].partition("=")[0]
    return next((name for name in _SRUN_LONG if name == flag or (len(flag) > 2 and name.startswith(flag))), None)


def format_number(value: int | float) -> str:
    """Format a number for a command line with the fewest digits from which ``float()`` restores the value.

    Magnitudes below 1 use the shorter of decimal and scientific notation (``3e-4``, ``0.05``). Other numbers use
    Python's notation, without a plus sign in the exponent (``1.0``, ``1500.0``, ``1e16``).
    """
    text = repr(value)
    if isinstance(value, int) or not math.isfinite(value):
        return text
    if "e" not in text and (value == 0 or abs(value) >= 1):
        return text
    mantissa, exponent = _scientific(text)
    scientific = f"{mantissa}e{exponent}"
    return scientific if "e" in text or len(scientific) < len(text) else text


def _scientific(text: str) -> tuple[str, int]:
    """Returns the mantissa and the exponent of a number: ("1.5", -4) for ``0.00015``."""
    sign = "-" if text.startswith("-") else ""
    digits, _, power = text.lstrip("-").partition("e")
    whole, _, fraction = digits.partition(".")
    exponent = int(power or 0) + len(whole) - 1
    figures = whole + fraction
    leading = len(figures) - len(figures.lstrip("0"))
    figures = figures.lstrip("0").rstrip("0")
    rest = f".{figures[1:]}" if len(figures) > 1 else ""
    return f"{sign}{figures[0]}{rest}", exponent - leading
