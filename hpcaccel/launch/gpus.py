"""The GPUs of this machine, counted without torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.errors import UserError

__all__ = ["Gpus", "chosen_gpus", "count_gpus", "find_gpus", "has_other_devices"]

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that limit which GPUs a program sees."""
_FOR_MOST = "CUDA_VISIBLE_DEVICES"
"""The variable that selects NVIDIA's GPUs. AMD's HIP reads it, too, and counts within ROCR_VISIBLE_DEVICES."""
_NO_GPU = ("", "-1", "nodevfiles")
"""Words that stand for no GPU, in lower case. Slurm writes NoDevFiles in jobs and steps without GPUs."""
_INTEL = "0x8086"
_DISPLAY = "0x0380"
"""PCI class of Intel's GPUs for computing: a display controller without a connector."""
_OTHER_DEVICES = (
    "nvidia[0-9]*", "dxg", "dri/renderD*", "accel/accel*", "davinci[0-9]*", "cambricon_dev[0-9]*", "neuron[0-9]*",
    "hl[0-9]*", "mtgpu*", "tcaicard*",
)  # fmt: skip
"""Device files of accelerators that ``find_gpus`` may not count: NVIDIA's without nvidia-smi (``dxg`` in WSL), Intel's
with a connector, and those of other vendors."""
_SECONDS = 60


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a program on this machine sees.

    Args:
        count: their number.
        variable: the variable in which ``chosen_gpus`` selects some of them.
    """

    count: int
    variable: str = _FOR_MOST


def find_gpus(environ: Mapping[str, str], *, system: Path = Path("/sys")) -> Gpus:
    """The GPUs that a program on this machine sees.

    A variable such as CUDA_VISIBLE_DEVICES decides, if one is set. Otherwise NVIDIA's GPUs are those that nvidia-smi
    lists, AMD's and Intel's those that the kernel lists.

    Args:
        system: where sysfs is.
    """
    for name in _VISIBLE:
        if name in environ:
            return Gpus(len(_listed(environ[name])), _FOR_MOST if name == "ROCR_VISIBLE_DEVICES" else name)
    if count := _nvidia() or _amd(system):
        return Gpus(count)
    count = _intel(system)
    return Gpus(count, "ZE_AFFINITY_MASK") if count else Gpus(0)


def count_gpus(environ: Mapping[str, str], *, system: Path = Path("/sys")) -> int:
    """The number of GPUs that a program on this machine sees; see ``find_gpus``."""
    return find_gpus(environ, system=system).count


def has_other_devices(*, devices: Path = Path("/dev")) -> bool:
    """Whether this machine may have accelerators that ``find_gpus`` does not count.

    Args:
        devices: where the device files are.
    """
    return sys.platform != "linux" or any(next(devices.glob(name), None) for name in _OTHER_DEVICES)


def chosen_gpus(ids: str, environ: Mapping[str, str], variable: str) -> dict[str, str]:
    """The variable that selects some of the GPUs that the environment makes visible.

    Args:
        ids: comma-separated indices, counted from 0 among the GPUs that the environment makes visible, or their names.
        variable: the name that ``find_gpus`` returned for this environment.

    Raises:
        UserError: there is no such GPU.
    """
    words = [word.strip() for word in ids.split(",")]
    if variable not in environ:
        return {variable: ",".join(words)}
    shown = _listed(environ[variable])
    by_word = {one: one for one in shown if not one.isdecimal()} | {str(index): one for index, one in enumerate(shown)}
    if missing := [word for word in words if word not in by_word]:
        many = f"{len(shown)} GPU{'s' * (len(shown) != 1)}"
        raise UserError(
            f"--gpu-ids {ids}: there is no GPU {missing[0]}. {variable}={environ[variable]} makes {many} visible, "
            "which --gpu-ids counts from 0"
        )
    return {variable: ",".join(by_word[word] for word in words)}


def _listed(value: str) -> list[str]:
    """The GPUs in the value of such a variable."""
    words = [word.strip() for word in value.split(",")]
    for number, word in enumerate(words):
        if word.lower() in _NO_GPU:  # CUDA ignores what follows an invalid index
            return words[:number]
    return words


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
