"""Accelerate's import path for hooks around a module's ``forward``."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.offload.aligned_devices import AlignDevicesHook
from hpcaccel.runtime.offload.attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from hpcaccel.runtime.offload.layerwise_casting import LayerwiseCastingHook
from hpcaccel.runtime.offload.module_hooks import (
    CpuOffload,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]
