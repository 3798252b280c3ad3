"""Accelerate's import path for models that are larger than a device: creating them on the meta device, loading their
weights, and distributing them over devices, CPU memory and the disk."""

from hpcaccel.runtime.checkpointing.mapped_load import load_checkpoint_and_dispatch, load_checkpoint_in_model
from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.offload.dispatch import cpu_offload, cpu_offload_with_hook, disk_offload, dispatch_model
from hpcaccel.runtime.offload.layerwise_casting import attach_layerwise_casting_hooks
from hpcaccel.runtime.parallel.meta_device import init_empty_weights, init_on_device

__all__ = [
    "attach_layerwise_casting_hooks",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]
