"""Accelerate's import path of the ``Accelerator``."""

from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.compat.everything import __getattr__ as __getattr__
from hpcaccel.runtime.distributed.process_states import AcceleratorState, GradientState, PartialState
from hpcaccel.runtime.enums import DistributedType
from hpcaccel.runtime.handlers import DataLoaderConfiguration, GradientAccumulationPlugin

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "DataLoaderConfiguration",
    "DistributedType",
    "GradientAccumulationPlugin",
    "GradientState",
    "PartialState",
]
