"""Accelerate's import path of the ``Accelerator``."""

from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.compat.everything import __getattr__ as __getattr__
from hpcaccel.runtime.handlers import DataLoaderConfiguration, GradientAccumulationPlugin
from hpcaccel.runtime.names import DistributedType
from hpcaccel.runtime.ranks.states import AcceleratorState, GradientState, PartialState

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "DataLoaderConfiguration",
    "DistributedType",
    "GradientAccumulationPlugin",
    "GradientState",
    "PartialState",
]
