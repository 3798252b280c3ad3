"""Parsers for Slurm's output about a site: partitions, nodes, accounts, QOS, configuration.

Tested on 22.05, 23.02, 24.05 and 26.11. Keys are Slurm's own. Releases add and rename keys, so no key is required here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hpcaccel.slurm.parsing import leading_number
from hpcaccel.slurm.states import Association, PartitionInfo, parse_duration

__all__ = [
    "ASSOCIATION_FORMAT",
    "EXPEDITED_REQUEUE_PARAMETER",
    "PARTITION_FORMAT",
    "associations",
    "config_values",
    "count",
    "failed_nodes",
    "first",
    "gres",
    "has_pyxis",
    "listed",
    "minutes",
    "partitions",
    "records",
    "seconds",
    "table",
    "tres",
    "unmountable_by_pyxis",
    "why_not_expedited",
]

PARTITION_FORMAT = "%P|%a|%D|%c|%m|%l|%L|%M|%p|%G"
ASSOCIATION_FORMAT = "DefaultAccount,Account,Partition,DefaultQOS,QOS"
EXPEDITED_REQUEUE_PARAMETER = "enable_expedited_requeue"
"""The option in SlurmctldParameters that allows ``sbatch --requeue=expedite``."""
_FIRST_EXPEDITED_RELEASE = (25, 11)

# -- tables and records -------------------------------------------------------------------------------------------

_PAIR = re.compile(r"(?:^|\s)(?=[A-Z][A-Za-z_/]*=)")
"""Start of a ``Key=value`` pair in scontrol's output."""
_NOTHING = frozenset({"", "(null)", "N/A", "n/s", "NONE", "None"})
_UNLIMITED = frozenset({"UNLIMITED", "INFINITE", "NOT_SET", "-1", "4294967295"})
_SCALES = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def records(text: str, key: str) -> list[dict[str, str]]:
    """The blocks or lines of ``scontrol show partition`` (``key`` is PartitionName) or ``show node`` (NodeName).

    A repeated key keeps its first value: free-text fields (Reason, Comment) come last and may contain anything.
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
    """The rows of ``sacctmgr --parsable2 show …``, keyed by the column names in its first line."""
    lines = [line.split("|") for line in text.split("\n") if "|" in line]
    if not lines:
        return []
    head, *rows = lines
    return [dict(zip(head, row, strict=False)) for row in rows if len(row) >= len(head)]


def listed(text: str | None) -> list[str]:
    """``a,b`` → [a, b]; [] for ``(null)`` and Slurm's other placeholders."""
    if text is None or text in _NOTHING:
        return []
    return [item.strip() for item in text.split(",") if item.strip()]


def seconds(text: str | None) -> int | None:
    """A duration such as ``30 sec``, ``2 min`` or ``1-00:00:00`` in seconds; None for any other text."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)\s*(sec|min|hour|day)s?", text.strip())
    if match:
        return int(match[1]) * {"sec": 1, "min": 60, "hour": 3600, "day": 86400}[match[2]]
    return parse_duration(text) if ":" in text or "-" in text else None


def minutes(text: str | None) -> int | None:
    """A limit such as ``1-00:00:00``, ``5 min`` or ``30`` (minutes) in minutes; None for any other text (UNLIMITED)."""
    if text is None:
        return None
    if text.strip().isdigit():
        return int(text)
    found = seconds(text)
    return None if found is None else found // 60


def count(text: str | None) -> int | None:
    """An integer, or a size such as ``20000M`` or ``750G`` in megabytes; None for any other text (UNLIMITED, N/A)."""
    if text is None or text.strip() in _UNLIMITED:
        return None
    match = re.match(r"(\d+)([MGT]?)", text.strip())
    return int(match[1]) * {"": 1, "M": 1, "G": 1024, "T": 1024**2}[match[2]] if match else None


def tres(text: str | None) -> dict[str, str]:
    """``cpu=4,gres/gpu=16`` → {"cpu": "4", "gres/gpu": "16"}."""
    pairs = (item.partition("=") for item in listed(text))
    return {name: value for name, equals, value in pairs if equals}


def gres(text: str | None) -> tuple[dict[str, int], list[str]]:
    """``gpu:a100:4(S:0-1),gpu:1,nvme:2`` → ({"a100": 4, "gpu": 1}, ["nvme:2"]); ``gpu`` counts GPUs without a type."""
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


def first(row: Mapping[str, str], *names: str) -> str:
    """The first non-empty value among these columns; headings depend on the release (``Def QOS``, ``DefaultQOS``)."""
    return next((row[name] for name in names if row.get(name, "") not in _NOTHING), "")


# -- partitions, accounts, configuration --------------------------------------------------------------------------


def partitions(text: str) -> list[PartitionInfo]:
    """One record for each partition, from ``sinfo --exact --noheader --format=PARTITION_FORMAT``."""
    merged: dict[str, PartitionInfo] = {}
    for line in text.split("\n"):
        cells = line.split("|", 9)
        if len(cells) == 10:
            one = _partition(cells)
            merged[one.name] = _merge(merged[one.name], one) if one.name in merged else one
    return list(merged.values())


def failed_nodes(text: str) -> list[str]:
    """Nodes that are down, failing or not responding (``idle*``), from ``sinfo --noheader --Node --format=%N|%T``."""
    cells = (line.partition("|") for line in text.splitlines())
    failed = (name for name, _, state in cells if state.lower().startswith(("down", "fail")) or state.endswith("*"))
    return list(dict.fromkeys(name.strip() for name in failed))


def _partition(cells: list[str]) -> PartitionInfo:
    name, available, nodes, cpus, memory, limit, default_time, preempt_mode, tier, gres = cells
    gpus, types = _gpus(gres)
    return PartitionInfo(
        name=name.removesuffix("*"),
        default=name.endswith("*"),
        available=available.lower() == "up",
        nodes=leading_number(nodes),
        cpus_per_node=leading_number(cpus),
        memory_mb_per_node=leading_number(memory),
        gpus_per_node=gpus,
        gpu_types=types,
        time_limit_seconds=parse_duration(limit),
        default_time_seconds=parse_duration(default_time),
        preempt_mode=preempt_mode,
        priority_tier=leading_number(tier),
    )


def _merge(a: PartitionInfo, b: PartitionInfo) -> PartitionInfo:
    return PartitionInfo(
        **{
            **a.__dict__,
            "nodes": a.nodes + b.nodes,
            "cpus_per_node": min(a.cpus_per_node, b.cpus_per_node),
            "memory_mb_per_node": min(a.memory_mb_per_node, b.memory_mb_per_node),
            "gpus_per_node": min(a.gpus_per_node, b.gpus_per_node),
            "gpu_types": tuple(dict.fromkeys(a.gpu_types + b.gpu_types)),
        }
    )


def _gpus(gres: str) -> tuple[int, tuple[str, ...]]:
    """``gpu:a100:4(S:0-1),gpu:v100:2,nvme:1`` → (6, ("a100", "v100"))."""
    count, types = 0, []
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        parts = item.strip().split(":")
        if parts[0] != "gpu":
            continue
        count += leading_number(parts[-1]) if len(parts) > 1 else 1
        if len(parts) > 2:
            types.append(parts[1])
    return count, tuple(types)


def associations(text: str) -> list[Association]:
    """Accounts from ``sacctmgr --parsable2 --noheader show user … withassoc format=ASSOCIATION_FORMAT``."""
    found = []
    for line in text.split("\n"):
        cells = line.split("|")
        if len(cells) != 5 or not cells[1]:
            continue
        default, account, partition, default_qos, qos = cells
        found.append(
            Association(
                account=account,
                default=account == default,
                partition=partition or None,
                qos=tuple(name for name in qos.split(",") if name),
                default_qos=default_qos or None,
            )
        )
    return found


def config_values(text: str) -> dict[str, str]:
    """The ``Key = value`` lines of ``scontrol show config``; (null) becomes an empty string."""
    pairs = (line.split("=", 1) for line in text.split("\n") if re.match(r"\w+\s*=", line))
    return {key.strip(): "" if value.strip() == "(null)" else value.strip() for key, value in pairs}


def why_not_expedited(config: Mapping[str, str]) -> str:
    """Why a cluster with this configuration rejects ``sbatch --requeue=expedite``; empty if it accepts the option."""
    version = config.get("SLURM_VERSION", "")
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < _FIRST_EXPEDITED_RELEASE:
        return f"it needs Slurm 25.11 or newer, and this cluster runs {version or 'an unknown release'}"
    if EXPEDITED_REQUEUE_PARAMETER not in config.get("SlurmctldParameters", ""):
        return f"SlurmctldParameters in this cluster's slurm.conf lacks {EXPEDITED_REQUEUE_PARAMETER}"
    return ""


# -- pyxis, a plugin of srun for containers ------------------------------------------------------------------------

_SHELL_SIGNS = re.compile(r"""["$`\\]""")
"""Characters that bash interprets between double quotes."""


def has_pyxis(srun_help: str) -> bool:
    """Whether the output of ``srun --help`` has pyxis's option (https://github.com/NVIDIA/pyxis)."""
    return "--container-image" in srun_help


def unmountable_by_pyxis(mounts: Iterable[str]) -> str | None:
    """Why pyxis cannot mount one of ``mounts`` (``SRC:DST[:FLAGS]``); None if it can mount all.

    pyxis writes each mount between double quotes into a bash script (pyxis_slurmstepd.c).
    """
    for mount in mounts:
        if found := _SHELL_SIGNS.search(mount):
            return (
                f"pyxis cannot mount {mount!r}: it does not escape paths in its shell script, and the path contains "
                f"{found[0]}"
            )
    return None
