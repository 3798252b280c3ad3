"""Use of GPUs, CPUs and memory by a run, from its nodes' samples: means, peaks, idle GPUs and energy."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from hpcaccel.core.run_dir import RunDir, numbered_folders
from hpcaccel.core.samples import Sample, bare_uuid, rank_gpus, read_samples, sampled_nodes
from hpcaccel.view.idle_stretches import Work, gpu_of, stretches_of

__all__ = ["GpuUsage", "NodeUsage", "Usage", "usage"]

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, kw_only=True)
class NodeUsage:
    """Usage of one node, over all attempts on it. Values are None if unknown."""

    node: str
    seconds: float
    """Time with samples."""
    source: str
    """Where CPU time and memory are from: ``cgroup1``, ``cgroup2`` or ``processes``."""
    cpu_share: float | None
    """Average share of the job's CPUs on the node that were in use."""
    cpus: int | None
    memory_peak_bytes: int | None
    memory_limit_bytes: int | None
    io_read_bytes: int | None
    io_write_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    """Usage of one GPU or MIG device, over all attempts on its node. Values are None if unknown."""

    node: str
    uuid: str
    name: str
    mig: bool
    seconds: float
    """Time with samples."""
    mean_utilization: float | None
    """In percent."""
    memory_peak_bytes: int | None
    memory_total_bytes: int | None
    idle_seconds: float
    """Time in idle stretches that were long enough to count."""
    idle_now: bool
    """Whether it was idle at the last sample, and long enough to count."""
    idle_since_step: int | None
    """The step at which the present idle stretch began; None if it is not idle, or without steps."""
    energy_kwh: float | None
    rank: int | None
    """The rank on this GPU in the newest attempt; None without a rank or with several."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Use of resources by one run. Times are seconds since the epoch."""

    nodes: list[NodeUsage] = field(default_factory=list)
    gpus: list[GpuUsage] = field(default_factory=list)
    idle_gpu_hours: float = 0.0
    energy_kwh: float | None = None
    """Energy of the GPUs; None if the driver reports it for none."""
    since: float | None = None
    until: float | None = None
    trained_seconds: float = 0.0
    """Time with samples from the first step to the last one, on the node that has the most."""

    @property
    def idle_gpus(self) -> list[GpuUsage]:
        """GPUs that were idle at their last sample."""
        return [gpu for gpu in self.gpus if gpu.idle_now]


def usage(run: RunDir) -> Usage | None:
    """The use of resources in all attempts of a run; None without samples. A result is kept until a file changes."""
    numbers = numbered_folders(run.attempts)
    files = [run.sample_file(number, node) for number in numbers for node in sampled_nodes(run, number)]
    return _usage(str(run.path), tuple(stamp for path in files if (stamp := _stamp(path)) is not None))


def _stamp(path: Path) -> tuple[str, int, int] | None:
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return None  # the run is being deleted
    return str(path), facts.st_mtime_ns, facts.st_size


@lru_cache(maxsize=256)
def _usage(folder: str, stamps: tuple[tuple[str, int, int], ...]) -> Usage | None:
    """The use of resources of the run in ``folder``, whose files of samples have these sizes and times."""
    run = RunDir(folder)
    numbers = numbered_folders(run.attempts) if stamps else []
    attempts = {number: samples for number in numbers if (samples := read_samples(run, number))}
    if not attempts:
        return None
    newest = max(attempts)
    nodes: dict[str, list[NodeUsage]] = defaultdict(list)
    gpus: dict[tuple[str, str], list[GpuUsage]] = defaultdict(list)
    trained = 0.0
    for number, samples in attempts.items():
        ranks, work = rank_gpus(run, number) if number == numbers[-1] else {}, Work(samples.values())
        for node, lines in samples.items():
            nodes[node].append(_node(node, lines))
            trained = max(trained, _trained_seconds(lines))
            for uuid in dict.fromkeys(gpu.uuid for line in lines for gpu in line.gpus):
                gpus[node, uuid].append(_gpu(node, uuid, lines, work, ranks, present=number == newest))
    own_gpus = [_add_gpus(several) for several in gpus.values()]
    energies = [gpu.energy_kwh for gpu in own_gpus if gpu.energy_kwh is not None]
    ends = [(lines[0].time, lines[-1].time) for samples in attempts.values() for lines in samples.values() if lines]
    return Usage(
        nodes=[_add_nodes(several) for several in nodes.values()],
        gpus=own_gpus,
        idle_gpu_hours=sum(gpu.idle_seconds for gpu in own_gpus) / 3600,
        energy_kwh=sum(energies) if energies else None,
        since=min((first for first, _ in ends), default=None),
        until=max((last for _, last in ends), default=None),
        trained_seconds=trained,
    )


# -- nodes ------------------------------------------------------------------------------------------------------------


def _node(node: str, lines: Sequence[Sample]) -> NodeUsage:
    seconds = sum(line.seconds for line in lines)
    cpu, cpus = _grown([line.cpu_seconds for line in lines]), _last(line.cpus for line in lines)
    return NodeUsage(
        node=node,
        seconds=seconds,
        source=lines[-1].source if lines else "",
        cpu_share=cpu / cpus / seconds if cpu is not None and cpus and seconds else None,
        cpus=cpus,
        memory_peak_bytes=_peak(line.memory_bytes for line in lines),
        memory_limit_bytes=_last(line.memory_limit for line in lines),
        io_read_bytes=_whole(_grown([line.io_read_bytes for line in lines])),
        io_write_bytes=_whole(_grown([line.io_write_bytes for line in lines])),
    )


def _add_nodes(several: Sequence[NodeUsage]) -> NodeUsage:
    last, shares = several[-1], [(one.cpu_share, one.seconds) for one in several]
    return NodeUsage(
        node=last.node,
        seconds=sum(one.seconds for one in several),
        source=last.source,
        cpu_share=_weighted(shares),
        cpus=last.cpus,
        memory_peak_bytes=_peak(one.memory_peak_bytes for one in several),
        memory_limit_bytes=last.memory_limit_bytes,
        io_read_bytes=_sum(one.io_read_bytes for one in several),
        io_write_bytes=_sum(one.io_write_bytes for one in several),
    )


def _trained_seconds(lines: Sequence[Sample]) -> float:
    stepped = [line for line in lines if line.step is not None]
    moves = [at for at in range(1, len(stepped)) if stepped[at].step != stepped[at - 1].step]
    return sum(line.seconds for line in stepped[moves[0] : moves[-1] + 1]) if moves else 0.0


# -- GPUs -------------------------------------------------------------------------------------------------------------


def _gpu(
    node: str, uuid: str, lines: Sequence[Sample], work: Work, ranks: dict[str, int], *, present: bool
) -> GpuUsage:
    seen = [(line, gpu) for line in lines if (gpu := gpu_of(line, uuid)) is not None]
    last, stretches = seen[-1][1], stretches_of(uuid, lines, work)
    now = present and stretches[-1].counts
    energy = _grown([gpu.energy_mj for _, gpu in seen])
    return GpuUsage(
        node=node,
        uuid=uuid,
        name=last.name,
        mig=last.mig,
        seconds=sum(line.seconds for line, _ in seen),
        mean_utilization=_weighted([(gpu.utilization, line.seconds) for line, gpu in seen]),
        memory_peak_bytes=_peak(gpu.memory_used for _, gpu in seen),
        memory_total_bytes=last.memory_total,
        idle_seconds=sum(one.seconds for one in stretches if one.counts),
        idle_now=now,
        idle_since_step=stretches[-1].since_step if now else None,
        energy_kwh=None if energy is None else energy / 1000 / JOULES_PER_KWH,
        rank=ranks.get(bare_uuid(uuid), last.ranks[0] if len(last.ranks) == 1 else None),
    )


def _add_gpus(several: Sequence[GpuUsage]) -> GpuUsage:
    last = several[-1]
    energies = [one.energy_kwh for one in several if one.energy_kwh is not None]
    return GpuUsage(
        node=last.node,
        uuid=last.uuid,
        name=last.name,
        mig=last.mig,
        seconds=sum(one.seconds for one in several),
        mean_utilization=_weighted([(one.mean_utilization, one.seconds) for one in several]),
        memory_peak_bytes=_peak(one.memory_peak_bytes for one in several),
        memory_total_bytes=last.memory_total_bytes,
        idle_seconds=sum(one.idle_seconds for one in several),
        idle_now=last.idle_now,
        idle_since_step=last.idle_since_step,
        energy_kwh=sum(energies) if energies else None,
        rank=last.rank,
    )


# -- numbers ----------------------------------------------------------------------------------------------------------


def _grown(values: Sequence[float | None]) -> float | None:
    """How much a counter has grown. A counter that falls has started again."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    return sum(max(0.0, after - before) for before, after in pairwise(known))


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _weighted(values: Sequence[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None and weight > 0]
    return sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None


def _peak(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _last(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return known[-1] if known else None


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
