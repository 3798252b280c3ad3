"""Accelerate's import path for the ``Accelerator``."""

from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.compat.import_paths import find_anywhere as __getattr__  # noqa: F401
from hpcaccel.runtime.enums import DistributedType
from hpcaccel.runtime.handlers import DataLoaderConfiguration, GradientAccumulationPlugin
from hpcaccel.runtime.states.accelerator_state import AcceleratorState
from hpcaccel.runtime.states.gradient_state import GradientState
from hpcaccel.runtime.states.partial_state import PartialState

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "DataLoaderConfiguration",
    "DistributedType",
    "GradientAccumulationPlugin",
    "GradientState",
    "PartialState",
]
