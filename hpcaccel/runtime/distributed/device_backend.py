"""One interface to devices of all vendors, through torch's accelerator API: no other module of the runtime calls
``torch.cuda`` for something that every kind of device can do.

Each kind of device (``cuda``, ``xpu``, ``npu`` …) has a module with the same functions: ``torch.cuda``, ``torch.xpu``,
``torch.npu`` (from the vendor's package torch_npu). ``torch.accelerator`` reports which kind this machine has. Only
names differ, and they are in ``KINDS``: Accelerate's distributed type, and the backend of
collectives. ROCm is torch's ``cuda`` with other libraries underneath; messages call it ROCm. ``xla_device`` has the
functions for TPUs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from hpcaccel.checkpoint.device_generator import device_generator
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed import xla_device
from hpcaccel.runtime.enums import DistributedType

logger = logging.getLogger(__name__)

__all__ = [
    "KINDS",
    "VISIBLE",
    "DeviceKind",
    "accelerator",
    "backend_name",
    "current_device",
    "device_count",
    "device_ids",
    "distributed_type",
    "empty_cache",
    "generator_of",
    "module_in_use",
    "module_of",
    "own_devices",
    "profiler_activity",
    "set_device",
    "synchronize",
    "timing_event",
    "uuid_of",
    "vendor",
]


class DeviceKind(NamedTuple):
    """Names that belong to a kind of device.

    Args:
        label: the kind's name in messages.
        distributed_type: type of a training with several ranks; None if only one process can use such devices.
        collectives: torch's name of the backend of collectives between such devices; None if there is none.
        package: package that adds the kind to torch; empty for torch itself.
        chooses_itself: whether the kind's own runtime gives each process its device.
    """

    label: str
    distributed_type: DistributedType | None
    collectives: str | None
    package: str = ""
    chooses_itself: bool = False


KINDS: Mapping[str, DeviceKind] = {
    "cpu": DeviceKind("CPU", DistributedType.MULTI_CPU, "gloo"),
    "cuda": DeviceKind("CUDA", DistributedType.MULTI_GPU, "nccl"),
    "xpu": DeviceKind("XPU (Intel)", DistributedType.MULTI_XPU, "xccl"),
    "mps": DeviceKind("MPS (Apple)", None, None, chooses_itself=True),
    "npu": DeviceKind("NPU (Ascend)", DistributedType.MULTI_NPU, "hccl", "torch_npu"),
    "mlu": DeviceKind("MLU (Cambricon)", DistributedType.MULTI_MLU, "cncl", "torch_mlu"),
    "musa": DeviceKind("MUSA (Moore Threads)", DistributedType.MULTI_MUSA, "mccl", "torch_musa"),
    "sdaa": DeviceKind("SDAA (Tecorigin)", DistributedType.MULTI_SDAA, "tccl", "torch_sdaa"),
    "hpu": DeviceKind("HPU (Gaudi)", DistributedType.MULTI_HPU, "hccl", "habana_frameworks.torch", True),
    "neuron": DeviceKind("Neuron (Trainium)", DistributedType.MULTI_NEURON, "neuron", "torch_neuronx", True),
    "xla": DeviceKind("XLA (TPU)", DistributedType.XLA, "xla", "torch_xla", True),
}
"""By torch's name of the kind."""

VISIBLE = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
    "ASCEND_RT_VISIBLE_DEVICES", "MLU_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES",
)  # fmt: skip
"""Variables with which launchers select the devices of a process."""

_used: Any = None
"""Module of the devices that this process has selected, if it is not ``torch.cuda``."""


def accelerator() -> str:
    """This machine's kind of device: a key of ``KINDS``, or another vendor's name; ``cpu`` without an accelerator.

    PJRT_DEVICE selects XLA. Without it, a torch_xla that the script has imported counts only where torch finds no other
    device. A vendor's package that is installed, but that torch has not loaded, is imported.
    """
    if xla_device.is_wanted():
        return "xla"
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is not None:
        return found.type
    # torch supports one type of accelerator at a time. It may be another vendor's, without a device here.
    if torch.cuda.is_available():
        return "cuda"
    if xla_device.is_initialized():
        return "xla"
    _load_vendors_packages()
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


@cache
def _load_vendors_packages() -> None:
    """Import the vendors' packages that are installed and that torch has not loaded by itself, once per process."""
    for name, kind in KINDS.items():
        top = kind.package.partition(".")[0]
        if top and name != "xla" and top not in sys.modules and find_spec(top) is not None:
            try:
                import_module(kind.package)
            except (ImportError, OSError, RuntimeError) as error:  # for example without the vendor's driver
                logger.warning("no %s device is used: %s cannot be imported: %s", kind.label, kind.package, error)


def module_of(kind: str) -> Any:
    """The module with the functions of a kind of device, such as ``torch.cuda``."""
    return xla_device if kind == "xla" else torch.get_device_module(kind)


def device_count(kind: str | None = None) -> int:
    """Number of devices that this process sees; 0 without an accelerator, 1 for XLA.

    Args:
        kind: default: this machine's kind.
    """
    kind = kind or accelerator()
    return 0 if kind == "cpu" else int(module_of(kind).device_count())


def set_device(device: torch.device) -> None:
    """Make ``device`` torch's current device, if its kind has a current device."""
    global _used
    module = module_of(device.type)
    if hasattr(module, "set_device"):
        module.set_device(device)
    _used = None if device.type in ("cpu", "cuda") else module


def uuid_of(device: torch.device) -> str:
    """UUID of a GPU, which is the same in all processes of a node; empty if torch does not report it."""
    if device.type != "cuda":
        return ""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # since torch 2.4
    return "" if found is None else f"GPU-{str(found).removeprefix('GPU-')}"


def current_device(kind: str) -> torch.device:
    """The current device of this kind. MPS has one device and no index."""
    if kind in ("cpu", "mps"):
        return torch.device(kind)
    return xla_device.device() if kind == "xla" else torch.device(kind, module_of(kind).current_device())


def distributed_type(device: torch.device) -> DistributedType:
    """The type of a training of several ranks on such devices. MULTI_CPU for kinds without collectives of their own."""
    kind = KINDS.get(device.type)
    found = DistributedType.MULTI_GPU if kind is None else kind.distributed_type
    return found or DistributedType.MULTI_CPU


def backend_name(device: torch.device) -> str:
    """torch's name of the backend of the default process group, for tensors on the CPU and on ``device``.

    Raises:
        RuntimeMisuse: several processes cannot use such devices together.
    """
    if device.type in ("cpu", "xla"):
        return KINDS[device.type].collectives or ""
    kind = KINDS.get(device.type)
    found = torch.distributed.Backend.default_device_backend_map.get(device.type) if kind is None else kind.collectives
    if found is None:
        raise RuntimeMisuse(
            f"there are no collectives between {device.type} devices: start one process, or train on CPUs with "
            "Accelerator(cpu=True)"
        )
    return f"cpu:gloo,{device.type}:{found}"


def device_ids(device: torch.device) -> list[int] | None:
    """DDP's argument of this name: None for devices without an index."""
    return None if device.type in ("cpu", "xla", "hpu") or device.index is None else [device.index]


def synchronize(device: torch.device) -> None:
    """Wait for the device's current stream; for all its work if its kind has no streams."""
    if device.type == "cpu":
        return
    module = module_of(device.type)
    if hasattr(module, "current_stream"):
        module.current_stream(device).synchronize()
    else:
        module.synchronize()


def empty_cache() -> None:
    """Release the memory that torch has cached on this machine's devices."""
    kind = accelerator()
    release = None if kind == "cpu" else getattr(module_of(kind), "empty_cache", None)
    if release is not None:
        release()


def timing_event(device: torch.device) -> Any | None:
    """The class of events that measure time on the device; None if the host's clock is to be used."""
    return None if device.type in ("cpu", "mps", "xla") else getattr(module_of(device.type), "Event", None)


def own_devices() -> bool:
    """Whether a variable selects this process's devices, as under Slurm with ``--gpus-per-task=1``."""
    return any(os.environ.get(name) for name in VISIBLE)


# -- random generators -------------------------------------------------------------------------------------------------


def module_in_use() -> Any | None:
    """The module of the devices that this process uses; None if it uses none, such as a forked worker."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda
    if _used is None:
        return None
    begun = getattr(_used, "is_initialized", None)
    if begun is not None:
        return _used if begun() else None
    return None if getattr(_used, "_is_in_bad_fork", bool)() else _used


def generator_of(kind: str) -> Any | None:
    """``device_generator`` of the current device of this kind; None if this machine has no such device."""
    return device_generator(current_device(kind)) if kind == accelerator() else None


# -- descriptions ------------------------------------------------------------------------------------------------------


def vendor(kind: str) -> str:
    """The kind's name for messages; ``ROCm`` for AMD's GPUs, which torch calls ``cuda``."""
    if kind == "cuda" and torch.version.hip is not None:
        return "ROCm"
    return KINDS[kind].label if kind in KINDS else kind


def profiler_activity(name: str) -> torch.profiler.ProfilerActivity:
    """torch's activity of this name; ``rocm`` maps to CUDA, and a vendor's device to PrivateUse1.

    Raises:
        RuntimeMisuse: there is no such activity.
    """
    members = torch.profiler.ProfilerActivity.__members__
    known = {member.lower(): member for member in members}
    known |= {"rocm": "CUDA", torch._C._get_privateuse1_backend_name(): "PrivateUse1"}
    if (found := known.get(str(name).lower())) is None or found not in members:
        raise RuntimeMisuse(f"ProfileKwargs: unknown activity {name!r} (allowed: {', '.join(sorted(known))})")
    return members[found]
