"""CPU time, memory and I/O of a job on this node: from Slurm's cgroup of the job, else from the job's processes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcaccel.node.samples.job_processes import JobProcesses
from hpcaccel.slurm import hostlist

__all__ = ["HostReader", "JobCgroup"]

_JOB = re.compile(r"job_\d+")
NO_LIMIT = 1 << 60
"""A memory limit of at least this value means that there is no limit."""


class HostReader:
    """Reads the job's CPU time, memory and I/O on this node.

    Args:
        local: whether this is the local backend, where no cgroup belongs to the run.
        whole_job: whether the run has the job for itself.
        proc: where the kernel's files about processes are.
        cgroups: where the cgroups are mounted.
    """

    def __init__(
        self,
        processes: JobProcesses,
        env: Mapping[str, str],
        *,
        node: str,
        local: bool,
        whole_job: bool,
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        self._processes = processes
        self._cgroup = JobCgroup(proc / "self" / "cgroup", cgroups) if whole_job and not local else None
        self._cpus, self._limit = (None, None)
        if whole_job:
            self._cpus = len(os.sched_getaffinity(0)) if local else _cpus_of(env, node)
            self._limit = None if local else _memory_of(env, self._cpus)

    def read(self) -> dict[str, Any]:
        """The fields of ``core.samples.Sample`` about the node."""
        cgroup = self._cgroup
        cpu = None if cgroup is None else cgroup.cpu_seconds()
        memory = None if cgroup is None else cgroup.memory_bytes()
        io: tuple[int | None, int | None] | None = None if cgroup is None else cgroup.io_bytes()
        limits = [self._limit, None if cgroup is None else cgroup.memory_limit()]
        if cpu is None or memory is None or io is None:
            totals = self._processes.totals()
            cpu = totals.cpu_seconds if cpu is None else cpu
            io = io or (totals.io_read_bytes, totals.io_write_bytes)
        source = "processes" if memory is None or cgroup is None else f"cgroup{cgroup.version}"
        return {
            "source": source,
            "cpu_seconds": cpu,
            "cpus": self._cpus or (None if cgroup is None else cgroup.cpus()),
            "memory_bytes": totals.memory_bytes if memory is None else memory,
            "memory_limit": min((one for one in limits if one is not None), default=None),
            "io_read_bytes": io and io[0],
            "io_write_bytes": io and io[1],
        }


class JobCgroup:
    """Slurm's cgroup of the job that this process belongs to. Values are None if the kernel does not report them.

    Args:
        own: the file with this process's cgroups, as cgroups(7) describes it.
        root: where the cgroups are mounted.
    """

    def __init__(self, own: Path, root: Path) -> None:
        self.version = 0
        self._folders: dict[str, Path] = {}
        """By controller; version 2 has one for all."""
        try:
            lines = own.read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            number, controllers, path = line.split(":", 2)
            parts = Path(path.lstrip("/")).parts
            at = next((at for at, part in enumerate(parts) if _JOB.fullmatch(part)), None)
            if at is None:
                continue
            below = Path(*parts[: at + 1])
            if number == "0" and not controllers:
                self._note("", [root / below, root / "unified" / below])
            for name in filter(None, controllers.split(",")):
                self._note(name, [root / controllers / below, root / name / below])
        if "memory" in self._folders or "cpuacct" in self._folders:
            self.version = 1
        elif "" in self._folders:
            self.version = 2

    def _note(self, controller: str, places: list[Path]) -> None:
        found = next((place for place in places if place.is_dir()), None)
        if found is not None:
            self._folders[controller] = found

    def cpu_seconds(self) -> float | None:
        if self.version == 2:
            microseconds = self._pairs("", "cpu.stat").get("usage_usec")
            return None if microseconds is None else microseconds / 1e6
        nanoseconds = self._number("cpuacct", "cpuacct.usage")
        return None if nanoseconds is None else round(nanoseconds / 1e9, 3)

    def memory_bytes(self) -> int | None:
        """Memory without the page cache, which the kernel frees as needed."""
        if self.version == 2:
            used, stat, prefix = self._number("", "memory.current"), self._pairs("", "memory.stat"), ""
        else:
            used, stat = self._number("memory", "memory.usage_in_bytes"), self._pairs("memory", "memory.stat")
            prefix = "total_"
        if used is None or f"{prefix}inactive_file" not in stat:
            return None
        return max(0, used - stat[f"{prefix}inactive_file"] - stat.get(f"{prefix}active_file", 0))

    def memory_limit(self) -> int | None:
        name = ("", "memory.max") if self.version == 2 else ("memory", "memory.limit_in_bytes")
        limit = self._number(*name)
        return None if limit is None or limit >= NO_LIMIT else limit

    def io_bytes(self) -> tuple[int, int] | None:
        if self.version != 2:
            return None  # version 1 counts only what was not buffered
        text = self._text("", "io.stat")
        if text is None:
            return None
        return tuple(sum(map(int, re.findall(rf"\b{key}=(\d+)", text))) for key in ("rbytes", "wbytes"))  # type: ignore[return-value]

    def cpus(self) -> int | None:
        text = self._text("", "cpuset.cpus.effective") if self.version == 2 else self._text("cpuset", "cpuset.cpus")
        count = 0
        for part in filter(None, (text or "").strip().split(",")):
            first, _, last = part.partition("-")
            count += int(last or first) - int(first) + 1
        return count or None

    def _text(self, controller: str, name: str) -> str | None:
        folder = self._folders.get(controller)
        try:
            return None if folder is None else (folder / name).read_text()
        except OSError:
            return None

    def _number(self, controller: str, name: str) -> int | None:
        text = (self._text(controller, name) or "").strip()
        return int(text) if text.isdecimal() else None

    def _pairs(self, controller: str, name: str) -> dict[str, int]:
        lines = (line.split() for line in (self._text(controller, name) or "").splitlines())
        return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}


def _cpus_of(env: Mapping[str, str], node: str) -> int | None:
    """The job's CPUs on ``node``, as Slurm counts them. The sampler's own step may have a single one."""
    try:
        nodes = hostlist.expand(env.get("SLURM_JOB_NODELIST", ""))
        counts = hostlist.tasks_per_node(env.get("SLURM_JOB_CPUS_PER_NODE", ""))
        return counts[nodes.index(node)]
    except (ValueError, IndexError):
        return None


def _memory_of(env: Mapping[str, str], cpus: int | None) -> int | None:
    """The job's memory per node in bytes; None if Slurm gives the job all memory, or if it is unknown."""
    node, each = env.get("SLURM_MEM_PER_NODE", ""), env.get("SLURM_MEM_PER_CPU", "")
    if node.isdecimal() and int(node):
        return int(node) << 20
    return (int(each) << 20) * cpus if each.isdecimal() and int(each) and cpus else None
