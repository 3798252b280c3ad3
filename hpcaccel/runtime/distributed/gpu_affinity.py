"""NVIDIA's GPUs of this machine by name, and the CPUs that are near a GPU."""

from __future__ import annotations

import logging
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import rank_env

__all__ = ["check_cuda_p2p_ib_support", "get_gpu_info", "override_numa_affinity", "set_numa_affinity"]

logger = logging.getLogger(__name__)

_WITHOUT_PEERS = "RTX 40"
"""GPUs of this series cannot exchange data directly with drivers that are older than the next one."""
_DRIVER = "550.40.07"
_SECONDS = 60


def get_gpu_info() -> tuple[list[str], int]:
    """The names of this machine's NVIDIA GPUs and their number, from nvidia-smi: torch does not initialize the GPUs.

    Raises:
        FileNotFoundError: there is no nvidia-smi.
        subprocess.CalledProcessError: nvidia-smi failed, for example without a driver.
    """
    names = _queried("name")
    return names, len(names)


def check_cuda_p2p_ib_support() -> bool:
    """Whether this machine's GPUs can exchange data directly (peer to peer, or by InfiniBand), as far as their names
    and the driver show: False for several GPUs of NVIDIA's RTX 40 series with a driver older than 550.40.07. torch does
    not initialize the GPUs."""
    try:
        names, count = get_gpu_info()
        if count < 2 or not any(_WITHOUT_PEERS in name for name in names):
            return True
        return TorchVersion(_queried("driver_version")[0]) >= TorchVersion(_DRIVER)
    except (OSError, subprocess.SubprocessError):  # no NVIDIA GPUs
        return True


def _queried(field: str) -> list[str]:
    """The value of a field of nvidia-smi for each GPU."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    return [line.strip() for line in answer.splitlines() if line.strip()]


def override_numa_affinity(
    local_process_index: int, verbose: bool | None = None, *, system: Path = Path("/sys")
) -> None:
    """Bind this process to the CPUs that are near its GPU, as far as Slurm's or the container's limits allow.

    Without CUDA or ROCm devices, and on machines that do not report which CPUs are near a GPU, this does nothing.

    Args:
        local_process_index: rank of this process on its node, which is the index of its GPU among those that it sees.
            If it sees only one GPU, that GPU is used.
        verbose: log the CPUs. Default: whether ACCELERATE_DEBUG_MODE is set.
        system: where sysfs is.

    Raises:
        RuntimeMisuse: there is no GPU with this index.
    """
    if not torch.cuda.is_available():
        return
    near = _near_cpus(_bus_address(local_process_index), system)
    if not near:
        return
    try:
        os.sched_setaffinity(0, near)  # the kernel leaves out CPUs that this process may not use
    except OSError as error:
        logger.warning(
            "the CPUs near GPU %s cannot be used (%s): the process stays bound to its CPUs",
            local_process_index,
            error,
        )
        return
    if rank_env.is_set("ACCELERATE_DEBUG_MODE") if verbose is None else verbose:
        bound = sorted(os.sched_getaffinity(0))
        logger.info("process %s is bound to %s CPUs: %s", local_process_index, len(bound), bound)


@cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """``override_numa_affinity``, but only in the first call with these arguments."""
    override_numa_affinity(local_process_index, verbose)


def _bus_address(index: int) -> str:
    """The PCI address of a GPU, as in sysfs."""
    count = torch.cuda.device_count()
    if count != 1 and not 0 <= index < count:
        raise RuntimeMisuse(f"local_process_index={index}: this process sees {count} GPUs, counted from 0")
    found: Any = torch.cuda.get_device_properties(0 if count == 1 else index)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _near_cpus(address: str, system: Path) -> set[int]:
    """The CPUs of a PCI device's NUMA node; empty if they are unknown, as in many virtual machines."""
    try:
        text = (system / "bus/pci/devices" / address / "local_cpulist").read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):  # such as 0-7,16-23
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
