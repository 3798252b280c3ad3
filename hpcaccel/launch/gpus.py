"""The GPUs of this machine, counted without torch."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

__all__ = ["count_gpus", "visible_variable"]

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that limit which GPUs a program sees."""
_INTEL = "0x8086"
_DISPLAY = "0x0380"
"""PCI class of Intel's GPUs for computing: a display controller without a connector."""
_SECONDS = 60


def count_gpus(environ: Mapping[str, str], *, system: Path = Path("/sys")) -> int:
    """The number of GPUs that a program on this machine sees.

    A variable such as CUDA_VISIBLE_DEVICES decides, if one is set. Otherwise NVIDIA's GPUs are those that nvidia-smi
    lists, AMD's and Intel's those that the kernel lists.

    Args:
        system: where sysfs is.
    """
    for name in _VISIBLE:
        if name in environ:
            return _listed(environ[name])
    return _nvidia() or _amd(system) or _intel(system)


def visible_variable(environ: Mapping[str, str], *, system: Path = Path("/sys")) -> str:
    """The variable that selects GPUs of this machine's vendor."""
    if "ZE_AFFINITY_MASK" in environ or (not _nvidia() and not _amd(system) and _intel(system)):
        return "ZE_AFFINITY_MASK"
    return "CUDA_VISIBLE_DEVICES"  # AMD's HIP reads it, too


def _listed(value: str) -> int:
    words = [word.strip() for word in value.split(",")]
    for number, word in enumerate(words):
        if not word or word == "-1":  # CUDA ignores what follows an invalid index
            return number
    return len(words)


def _nvidia() -> int:
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines()) if answer.returncode == 0 else 0


def _amd(system: Path) -> int:
    nodes = system.glob("class/kfd/kfd/topology/nodes/*/properties")
    return sum(_has_processors(path) for path in nodes)


def _has_processors(properties: Path) -> bool:
    """Whether a node of AMD's topology is a GPU. CPUs are nodes, too, without SIMD units."""
    for line in _read(properties).splitlines():
        if line.startswith("simd_count "):
            return line.split()[1] != "0"
    return False


def _intel(system: Path) -> int:
    devices = system.glob("bus/pci/devices/*")
    return sum(_read(one / "vendor") == _INTEL and _read(one / "class").startswith(_DISPLAY) for one in devices)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a node of the topology that this user's cgroup excludes
        return ""
