"""Advice for the next spec, from what a run used: memory, CPUs and GPUs requested but not used, waits for data.

A sentence is given only with enough evidence: samples of at least ten minutes of training, or of half an hour of a
program that reports no steps. Each names the field of the spec to change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.formatting import counted, gpu_hours, percent, shortened
from hpcaccel.core.run_dir import RunDir
from hpcaccel.view.usage import GpuUsage, NodeUsage, Usage

__all__ = ["gpu_label", "hints", "in_gb"]

TRAINED_SECONDS = 600.0
SAMPLED_SECONDS = 1800.0
GIB = 1 << 30
MEMORY_SHARE = 0.5
"""If less of the requested memory was used, a smaller request is recommended."""
MEMORY_MARGIN = 1.5
"""The recommended memory, as a multiple of the largest use."""
FULL_SHARE = 0.95
LEAST_SAVED_GIB = 4
CPU_SHARE = 0.25
"""If fewer of the requested CPUs were in use, fewer are recommended."""
CPU_MARGIN = 1.5
LEAST_CPUS = 4
"""Nodes with fewer CPUs per task are left alone."""
DATA_WAIT_SHARE = 0.15
GPU_MEMORY_SHARE = 0.25
SHOWN = 4
"""At most this many GPUs are named one by one."""
_AMOUNT = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
_UNITS = {"K": 1 << 10, "": 1 << 20, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def hints(run: RunDir, use: Usage | None, *, data_wait_share: float | None = None) -> list[str]:
    """Advice for the next submission of this run's spec, the most valuable first.

    Args:
        use: the run's use of resources; None without samples.
        data_wait_share: share of the training time spent waiting for data, from 0 to 1; None if unknown.
    """
    section: dict[str, Any] = (read_json(run.spec) or {}).get("spec", {}).get("slurm") or {}
    found: list[str] = []
    if use is not None:
        found += _idle_gpus(use, section)
    waits = data_wait_share is not None and data_wait_share >= DATA_WAIT_SHARE
    if waits:
        found.append(_data(data_wait_share or 0.0, use))
    if use is not None and _is_enough(use):
        found += _memory(use, section)
        if not waits:
            found += _cpus(use, section)
        found += _gpu_memory(use)
    return found


def gpu_label(gpu: GpuUsage) -> str:
    """How a GPU is named: ``GPU-1a2b3c4d (rank 3) of node n2``. Its index may differ between processes."""
    rank = "" if gpu.rank is None else f" (rank {gpu.rank})"
    return f"{gpu.uuid[:12]}{rank} of node {gpu.node}"


def _is_enough(use: Usage) -> bool:
    longest = max((one.seconds for one in use.nodes), default=0.0)
    return use.trained_seconds >= TRAINED_SECONDS or (use.trained_seconds == 0 and longest >= SAMPLED_SECONDS)


# -- GPUs -------------------------------------------------------------------------------------------------------------


def _idle_gpus(use: Usage, section: Mapping[str, Any]) -> Iterator[str]:
    never = [gpu for gpu in use.gpus if gpu.idle_seconds and gpu.idle_seconds >= 0.95 * gpu.seconds]
    others = [gpu for gpu in use.idle_gpus if gpu not in never]
    if never and len(never) < len(use.gpus):
        names = shortened([gpu_label(gpu) for gpu in never], SHOWN)
        hours = gpu_hours(sum(gpu.idle_seconds for gpu in never) / 3600)
        verb = "was" if len(never) == 1 else "were"
        yield f"{counted(len(never), 'GPU')} {verb} never used ({names}; {hours} GPU-hours): {_fewer_gpus(section)}"
    elif never:
        hours = gpu_hours(sum(gpu.idle_seconds for gpu in never) / 3600)
        yield f"no GPU was used ({hours} GPU-hours): check that the program selects them, or {_no_gpus(section)}"
    for gpu in others[:SHOWN]:
        step = "" if gpu.idle_since_step is None else f" since step {gpu.idle_since_step}"
        hours = gpu_hours(gpu.idle_seconds / 3600)
        yield f"GPU {gpu_label(gpu)} idle{step} ({hours} GPU-hours): `hpcaccel stacks` shows what its rank is doing"
    if len(others) > SHOWN:
        yield f"{len(others) - SHOWN} more GPUs are idle"


def _fewer_gpus(section: Mapping[str, Any]) -> str:
    field = next((name for name in ("gpus_per_node", "gpus_per_task", "gres") if section.get(name)), "gpus_per_node")
    return f"request fewer with slurm.{field}, or start a rank for each"


def _no_gpus(section: Mapping[str, Any]) -> str:
    field = next((name for name in ("gpus_per_node", "gpus_per_task", "gres") if section.get(name)), "gpus_per_node")
    return f"leave out slurm.{field}"


def _gpu_memory(use: Usage) -> Iterator[str]:
    known = [
        (gpu.memory_peak_bytes, gpu.memory_total_bytes)
        for gpu in use.gpus
        if gpu.memory_peak_bytes is not None and gpu.memory_total_bytes and gpu.mean_utilization
    ]
    if known and all(peak < GPU_MEMORY_SHARE * total for peak, total in known):
        peak, total = max(known, key=lambda one: one[0] / one[1])
        yield (
            f"GPU memory: used at most {in_gb(peak)} of {in_gb(total)} GB: a larger batch may be faster, or a smaller "
            "GPU or MIG device may be enough (slurm.gpus_per_node)"
        )


# -- memory and CPUs --------------------------------------------------------------------------------------------------


def _memory(use: Usage, section: Mapping[str, Any]) -> Iterator[str]:
    nodes = [one for one in use.nodes if one.memory_peak_bytes is not None and one.memory_limit_bytes]
    if not nodes or len(nodes) < len(use.nodes):
        return
    fullest = max(nodes, key=lambda one: (one.memory_peak_bytes or 0) / (one.memory_limit_bytes or 1))
    highest = max(nodes, key=lambda one: one.memory_peak_bytes or 0)
    peak, limit = highest.memory_peak_bytes or 0, highest.memory_limit_bytes or 0
    if (fullest.memory_peak_bytes or 0) >= FULL_SHARE * (fullest.memory_limit_bytes or 0):
        if fullest.source != "processes":  # which count shared pages several times
            words = f"used {in_gb(fullest.memory_peak_bytes or 0)} of {in_gb(fullest.memory_limit_bytes or 0)} GB"
            yield f"memory: {words} of node {fullest.node}, which is nearly all of it: request more"
        return
    advice = _smaller_request(peak, highest, section)
    if peak < MEMORY_SHARE * limit and advice:
        yield f"memory: used {in_gb(peak)} of {in_gb(limit)} GB: request {advice}"


def _smaller_request(peak: int, node: NodeUsage, section: Mapping[str, Any]) -> str:
    """The field for memory with its new value, such as ``10G (slurm.mem)``; empty if the spec requests none, or if the
    request could hardly become smaller."""
    wanted = max(MEMORY_MARGIN * peak, peak + GIB)
    if (asked := _bytes_of(section.get("mem"))) is not None:
        value = _round_up(wanted / GIB)
        return f"{value}G (slurm.mem)" if asked / GIB - value >= LEAST_SAVED_GIB else ""
    if (asked := _bytes_of(section.get("mem_per_cpu"))) is not None and node.cpus:
        value = max(1, math.ceil(wanted / node.cpus / (1 << 20) / 256)) * 256
        saved = (asked - (value << 20)) * node.cpus / GIB
        return f"{value}M per CPU (slurm.mem_per_cpu)" if saved >= LEAST_SAVED_GIB else ""
    return ""


def _bytes_of(value: Any) -> int | None:
    """The bytes of a request such as ``40G``; None without one, and for 0, which stands for all memory."""
    match = _AMOUNT.fullmatch(str(value)) if value is not None else None
    return int(match[1]) * _UNITS[match[2].upper()] or None if match else None


def _round_up(value: float) -> int:
    """The next whole number, with at most two digits that are not zero: 9 → 10, 37 → 40, 212 → 220."""
    whole = math.ceil(value)
    step = 1 if whole < 9 else 2 if whole < 20 else 5 if whole < 50 else 10 ** (len(str(whole)) - 2) * 10 // 5
    return math.ceil(whole / step) * step


def _cpus(use: Usage, section: Mapping[str, Any]) -> Iterator[str]:
    field = next((name for name in ("cpus_per_task", "cpus_per_gpu") if section.get(name)), "")
    known = [(one.cpu_share, one.cpus) for one in use.nodes if one.cpu_share is not None and one.cpus]
    if not field or not known or len(known) < len(use.nodes):
        return
    share, cpus = max(known)
    asked = int(section[field])
    better = max(2, math.ceil(share * asked * CPU_MARGIN))
    if asked >= LEAST_CPUS and share < CPU_SHARE and better < asked:
        used = f"{share * cpus:.1f}" if share * cpus < 10 else f"{share * cpus:.0f}"
        yield f"CPUs: used {used} of {cpus} per node on average: set slurm.{field} to {better} instead of {asked}"


def _data(share: float, use: Usage | None) -> str:
    busiest = max((one.cpu_share for one in use.nodes if one.cpu_share is not None), default=None) if use else None
    if busiest is not None and busiest >= 0.9:
        more = f"request more CPUs (slurm.cpus_per_task; {percent(busiest)} are in use)"
    else:
        more = "use more workers (num_workers of the DataLoader)"
    return f"{100 * share:.0f} % of the time is spent waiting for data: {more}"


def in_gb(count: int) -> str:
    """Bytes in units of Slurm's G (2**30), such as ``6`` or ``0.4``."""
    value = count / GIB
    return f"{value:.0f}" if value >= 9.5 or abs(value - round(value)) < 0.05 else f"{value:.1f}"
