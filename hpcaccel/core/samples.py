"""Samples of a node, one line every 15 s: use of its CPUs, memory, disks and GPUs.

The sampler of the node writes the lines to ``attempts/<n>/samples/<node>.jsonl`` (``node/samples``). A file has a size
limit: if it is reached, older lines are merged in pairs, so that a long attempt keeps its whole history, with less
detail for older times. GPUs are identified by UUID, never by index: indices may differ between processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import objects_in, read_json, read_lines
from hpcaccel.core.rank_records import Beat
from hpcaccel.core.records import from_dict
from hpcaccel.core.run_dir import RunDir, numbered_folders
from hpcaccel.errors import RunDirectoryError

__all__ = [
    "IDLE_SECONDS",
    "GpuSample",
    "IdleGpu",
    "Sample",
    "bare_uuid",
    "idle_now",
    "is_idle",
    "merge",
    "rank_gpus",
    "read_samples",
    "sampled_nodes",
]

IDLE_PERCENT = 2.0
"""A GPU whose utilization is below this value is idle."""
IDLE_SECONDS = 600.0
"""A GPU that has done nothing for a shorter time does not count as idle: it may wait for a save or a validation."""
IDLE_SHARE = 0.95
"""A line counts as idle if the GPU was idle for at least this share of its time."""
TAIL_BYTES = 256_000
"""How much of a file's end ``idle_now`` reads."""
LATE_SECONDS = 180.0
"""A last line older than this does not describe the current state."""


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One GPU, or one MIG device, during the time of a line. Values are None if the driver does not report them."""

    uuid: str
    name: str = ""
    mig: bool = False
    utilization: float | None = None
    """Mean share of the time in which the GPU computed, in percent."""
    memory_used: int | None = None
    """Largest value, in bytes."""
    memory_total: int | None = None
    power_watts: float | None = None
    energy_mj: int | None = None
    """The driver's counter, in millijoules; it grows since the driver was loaded."""
    idle_seconds: float = 0.0
    """How much of the line's time the GPU was idle."""
    ranks: list[int] = field(default_factory=list)
    """Ranks with processes on this GPU."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One line: the period that ends at ``time`` (seconds since the epoch). Values are None if unknown on this node."""

    time: float
    seconds: float = 0.0
    """The length of the time that the line describes; 0 for the first line, which has only the counters."""
    source: str = ""
    """What memory and CPU time are read from: ``cgroup2``, ``cgroup1`` or ``processes``."""
    cpu_seconds: float | None = None
    """A counter: CPU time since some moment."""
    cpus: int | None = None
    """The job's CPUs on the node."""
    memory_bytes: int | None = None
    """Largest value, without the page cache. With ``processes``, pages that processes share count several times."""
    memory_limit: int | None = None
    """The job's memory on the node, in bytes."""
    io_read_bytes: int | None = None
    """A counter: bytes read from disks, and from network file systems as far as the kernel counts them."""
    io_write_bytes: int | None = None
    step: int | None = None
    """The last step of rank 0."""
    gpus: list[GpuSample] = field(default_factory=list)

    @classmethod
    def of(cls, line: dict[str, Any]) -> Sample:
        """Build a sample from a line of the file.

        Raises:
            TypeError: the line lacks ``time`` or a GPU's ``uuid``.
        """
        gpus = [GpuSample(**{key: gpu[key] for key in gpu.keys() & _GPU_FIELDS}) for gpu in line.get("gpus", [])]
        return cls(**{key: line[key] for key in line.keys() & _FIELDS}, gpus=gpus)


_GPU_FIELDS = {item.name for item in fields(GpuSample)}
_FIELDS = {item.name for item in fields(Sample)} - {"gpus"}


@dataclass(frozen=True, kw_only=True)
class IdleGpu:
    """A GPU that has been idle until now, and for how long."""

    node: str
    uuid: str
    name: str
    seconds: float
    since_step: int | None
    ranks: list[int]


def bare_uuid(uuid: str) -> str:
    """A UUID without ``GPU-`` or ``MIG-``, in lower case."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def is_idle(gpu: GpuSample, seconds: float) -> bool:
    """Whether the GPU was idle throughout a line that covers this many seconds."""
    return seconds > 0 and gpu.idle_seconds >= IDLE_SHARE * seconds


def merge(first: Sample, second: Sample) -> Sample:
    """One sample that covers the time of two consecutive ones."""
    before = {gpu.uuid: gpu for gpu in first.gpus}
    gpus = [_merge_gpus(before.pop(gpu.uuid, None), gpu, first.seconds, second.seconds) for gpu in second.gpus]
    return replace(
        second,
        seconds=round(first.seconds + second.seconds, 3),
        memory_bytes=_largest(first.memory_bytes, second.memory_bytes),
        gpus=[*gpus, *before.values()],
    )


def _merge_gpus(first: GpuSample | None, second: GpuSample, before: float, after: float) -> GpuSample:
    if first is None:
        return second
    return replace(
        second,
        utilization=_mean(first.utilization, second.utilization, before, after),
        memory_used=_largest(first.memory_used, second.memory_used),
        power_watts=_mean(first.power_watts, second.power_watts, before, after),
        idle_seconds=round(first.idle_seconds + second.idle_seconds, 3),
        ranks=sorted({*first.ranks, *second.ranks}),
    )


def _largest(*values: int | None) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _mean(first: float | None, second: float | None, before: float, after: float) -> float | None:
    if first is None or second is None or not before + after:
        return second if first is None or second is not None else first
    return round((first * before + second * after) / (before + after), 2)


# -- reading ----------------------------------------------------------------------------------------------------------


def sampled_nodes(run: RunDir, attempt: int) -> list[str]:
    """The nodes of an attempt that have samples."""
    try:
        names = os.listdir(run.samples(attempt))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name.removesuffix(".jsonl") for name in names if name.endswith(".jsonl") and name[0] != ".")


def read_samples(run: RunDir, attempt: int) -> dict[str, list[Sample]]:
    """All samples of an attempt by node, oldest first. Lines that are not samples are skipped."""
    return {
        node: list(_samples(line for line, _ in read_lines(run.sample_file(attempt, node))))
        for node in sampled_nodes(run, attempt)
    }


def _samples(lines: Iterable[dict[str, Any]]) -> Iterable[Sample]:
    for line in lines:
        try:
            yield Sample.of(line)
        except (TypeError, AttributeError):
            continue  # of another release


def rank_gpus(run: RunDir, attempt: int) -> dict[str, int]:
    """Ranks by the bare UUID of the GPU that they use, as the ranks themselves recorded it. A GPU that several ranks
    use is left out."""
    found: dict[str, list[int]] = {}
    for path in run.heartbeats(attempt).glob("*.json"):
        try:
            value = read_json(path)
            beat = None if value is None else from_dict(Beat, value)
        except (OSError, RunDirectoryError, TypeError):
            continue  # damaged
        if beat is not None and beat.gpu:
            found.setdefault(bare_uuid(beat.gpu), []).append(beat.rank)
    return {uuid: ranks[0] for uuid, ranks in found.items() if len(ranks) == 1}


def idle_now(run: RunDir, attempt: int | None = None, *, now: float | None = None) -> list[IdleGpu]:
    """GPUs that have been idle for ``IDLE_SECONDS`` or longer and are idle now, while the run trains or another of its
    GPUs works. Reads only the ends of the files, so that it may be called every minute.

    Args:
        attempt: default: the newest one.
        now: the present time (seconds since the epoch).
    """
    numbers = numbered_folders(run.attempts) if attempt is None else [attempt]
    if not numbers:
        return []
    tails = {node: _tail(run.sample_file(numbers[-1], node)) for node in sampled_nodes(run, numbers[-1])}
    moment = time.time() if now is None else now
    tails = {node: lines for node, lines in tails.items() if lines and moment - lines[-1].time <= LATE_SECONDS}
    recent = [line for lines in tails.values() for line in lines if moment - line.time <= IDLE_SECONDS]
    steps = {line.step for line in recent if line.step is not None}
    works = any(not is_idle(gpu, line.seconds) for line in recent for gpu in line.gpus if gpu.utilization is not None)
    if len(steps) < 2 and not works:
        return []
    return [found for node, lines in tails.items() for found in _idle_in(node, lines)]


def _idle_in(node: str, lines: Sequence[Sample]) -> Iterable[IdleGpu]:
    for gpu in lines[-1].gpus:
        seconds, since = 0.0, None
        for line in reversed(lines):
            same = next((one for one in line.gpus if one.uuid == gpu.uuid), None)
            if same is None or not is_idle(same, line.seconds):
                since = line.step
                break
            seconds, since = seconds + line.seconds, line.step
        if seconds >= IDLE_SECONDS:
            yield IdleGpu(
                node=node, uuid=gpu.uuid, name=gpu.name, seconds=seconds, since_step=since, ranks=list(gpu.ranks)
            )


def _tail(path: Path) -> list[Sample]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return list(_samples(objects_in(data, keys={"time"})))
