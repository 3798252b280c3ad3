"""Accelerate's import path of the ``Accelerator``."""

from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.names import DistributedType
from hpcaccel.runtime.ranks.states import GradientState, PartialState

__all__ = ["Accelerator", "DistributedType", "GradientState", "PartialState"]
