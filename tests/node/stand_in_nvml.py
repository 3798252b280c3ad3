"""A stand-in for the module ``pynvml``: its GPUs are plain data, with the errors of real drivers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace


class NVMLError(Exception):
    pass


class NVMLLibraryMismatchError(Exception):
    """As in pynvml, this is no NVMLError."""


@dataclass
class FakeGpu:
    uuid: str
    name: str = "NVIDIA A100-SXM4-80GB"
    utilization: int | None = 0
    used: int = 0
    total: int = 80 << 30
    milliwatts: int | None = 60_000
    energy_mj: int | None = 0
    pids: list[int] = field(default_factory=list)
    mig: list[FakeGpu] = field(default_factory=list)
    hidden: bool = False
    """Whether a cgroup hides it: NVML counts it and refuses to open it."""


class FakeNvml:
    """The functions of pynvml that the sampler calls. Handles are the GPUs themselves."""

    NVMLError = NVMLError
    NVMLLibraryMismatchError = NVMLLibraryMismatchError
    nvmlMemory_v2 = 2

    def __init__(self, gpus: Sequence[FakeGpu], *, broken: bool = False, is_old: bool = False) -> None:
        self.gpus, self._broken, self.is_old = list(gpus), broken, is_old

    def nvmlInit(self) -> None:
        if self._broken:
            raise NVMLError("Driver/library version mismatch")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if self.gpus[index].hidden:
            raise NVMLError("Insufficient Permissions")
        return self.gpus[index]

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return [int(bool(gpu.mig))] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:
        if index >= len(gpu.mig):
            raise NVMLError("Not Found")
        return gpu.mig[index]

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> bytes:
        return gpu.name.encode()  # as releases before 11.5

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(gpu=_told(gpu.utilization))

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu, version: int | None = None) -> SimpleNamespace:
        if version is not None:
            raise NVMLError("Function Not Found")  # of drivers before 510
        return SimpleNamespace(used=gpu.used, total=gpu.total)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        return _told(gpu.milliwatts)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        return _told(gpu.energy_mj)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        if self.is_old:
            raise NVMLLibraryMismatchError("Unversioned function called and the pyNVML version does not match")
        return self.nvmlDeviceGetComputeRunningProcesses_v2(gpu)

    def nvmlDeviceGetComputeRunningProcesses_v2(self, gpu: FakeGpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in gpu.pids]


def _told(value: int | None) -> int:
    if value is None:
        raise NVMLError("Not Supported")
    return value
