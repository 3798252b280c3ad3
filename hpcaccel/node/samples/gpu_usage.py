"""The job's NVIDIA GPUs on this node, from the driver's library NVML. GPUs and MIG devices are identified by UUID.

Which GPUs are the job's: those whose UUIDs are in CUDA_VISIBLE_DEVICES; else all that NVML shows, if these are not more
than the job has, because Slurm then hides the others; else only those on which a process of the run works. An index is
no evidence: CUDA, NVML and Slurm number GPUs differently.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hpcaccel.core.samples import IDLE_PERCENT, GpuSample
from hpcaccel.node.samples.job_processes import JobProcesses

__all__ = ["GpuReader", "load_nvml"]

T = TypeVar("T")


def load_nvml() -> Any:
    """The module ``pynvml``, which is stored in node.pyz; None without NVIDIA's driver or without the module."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        import pynvml  # type: ignore[import-untyped]
    except (OSError, ImportError):
        return None
    return pynvml


@dataclass
class _Device:
    handle: Any
    uuid: str
    name: str
    mig: bool
    seen_ours: bool = False
    """Whether a process of the run has worked on it."""
    ranks: set[int] = field(default_factory=set)


class GpuReader:
    """Reads the job's GPUs.

    Args:
        nvml: the module ``pynvml``, or None.
        local: whether this is the local backend, where all GPUs are the run's unless CUDA_VISIBLE_DEVICES is set.
        whole_job: whether the run has the job for itself.
    """

    def __init__(
        self, nvml: Any, processes: JobProcesses, env: Mapping[str, str], *, local: bool, whole_job: bool
    ) -> None:
        self._nvml, self._processes = nvml, processes
        self._devices: list[_Device] = []
        if nvml is None:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            print(f"hpcaccel: no samples of GPUs: {error}", flush=True)
            self._nvml = None
            return
        self._devices = list(self._find())
        self._listed = [one.strip() for one in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
        self._by_uuid = bool(self._listed) and all(one.startswith(("GPU-", "MIG-")) for one in self._listed)
        self._all = whole_job and len(self._devices) <= self._expected(env, local=local)

    def _expected(self, env: Mapping[str, str], *, local: bool) -> int:
        """How many GPUs the job has on this node."""
        if local:
            return len(self._listed) if "CUDA_VISIBLE_DEVICES" in env else len(self._devices)
        count = env.get("SLURM_GPUS_ON_NODE", "")
        return int(count) if count.isdecimal() else len(self._listed)

    def read(self, seconds: float) -> list[GpuSample]:
        """The state of the job's GPUs.

        Args:
            seconds: time since the last call.
        """
        return [self._sample(device, seconds) for device in self._devices if self._is_ours(device)]

    def _is_ours(self, device: _Device) -> bool:
        pids = self._pids(device)
        ours = [pid for pid in pids or () if self._processes.has(pid)]
        ranks = {rank for pid in ours if (rank := self._processes.rank_of(pid)) is not None}
        device.ranks = ranks or device.ranks
        device.seen_ours = device.seen_ours or bool(ours)
        if self._by_uuid:
            return any(device.uuid.startswith(one) for one in self._listed)  # CUDA accepts the beginning of a UUID
        return self._all or device.seen_ours

    def _sample(self, device: _Device, seconds: float) -> GpuSample:
        nvml, handle = self._nvml, device.handle
        utilization = None if device.mig else self._ask(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
        if memory is None:
            memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        power = None if device.mig else self._ask(lambda: float(nvml.nvmlDeviceGetPowerUsage(handle)))
        energy = None if device.mig else self._ask(lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)))
        # The driver reports no utilization of MIG devices. One without a process is idle all the same.
        idle = self._pids(device) == [] if utilization is None else utilization < IDLE_PERCENT
        return GpuSample(
            uuid=device.uuid,
            name=device.name,
            mig=device.mig,
            utilization=utilization,
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            power_watts=None if power is None else round(power / 1000, 1),
            energy_mj=energy,
            idle_seconds=round(seconds, 3) if idle else 0.0,
            ranks=sorted(device.ranks),
        )

    def _pids(self, device: _Device) -> list[int] | None:
        found = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(device.handle))
        if found is None:
            found = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses_v2(device.handle))
        return None if found is None else [one.pid for one in found]

    def _find(self) -> Iterator[_Device]:
        nvml = self._nvml
        for index in range(self._ask(nvml.nvmlDeviceGetCount) or 0):
            # GPUs that a cgroup hides are counted, but cannot be opened.
            handle = self._ask(lambda index=index: nvml.nvmlDeviceGetHandleByIndex(index))  # type: ignore[misc]
            if handle is None:
                continue
            mode = self._ask(lambda handle=handle: nvml.nvmlDeviceGetMigMode(handle)[0])  # type: ignore[misc]
            parts = list(self._find_mig(handle)) if mode else []
            yield from parts or self._device(handle, mig=False)

    def _find_mig(self, parent: Any) -> Iterator[_Device]:
        nvml = self._nvml
        for index in range(self._ask(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(parent)) or 0):
            part = self._ask(lambda index=index: nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, index))  # type: ignore[misc]
            if part is not None:
                yield from self._device(part, mig=True)

    def _device(self, handle: Any, *, mig: bool) -> Iterator[_Device]:
        uuid = self._ask(lambda: _text(self._nvml.nvmlDeviceGetUUID(handle)))
        name = self._ask(lambda: _text(self._nvml.nvmlDeviceGetName(handle)))
        if uuid is not None:
            yield _Device(handle=handle, uuid=uuid, name=name or "", mig=mig)

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The driver's value; None if the driver does not report it, or is too old to support the query."""
        try:
            return question()
        except (self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError):
            return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
