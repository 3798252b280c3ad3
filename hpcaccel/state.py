"""Accelerate's import path of the states, which live in ``hpcaccel.runtime.ranks.states``."""

from hpcaccel.runtime.compat.absent import __getattr__ as __getattr__
from hpcaccel.runtime.names import DistributedType as DistributedType
from hpcaccel.runtime.ranks.states import AcceleratorState as AcceleratorState
from hpcaccel.runtime.ranks.states import GradientState as GradientState
from hpcaccel.runtime.ranks.states import PartialState as PartialState
from hpcaccel.runtime.ranks.states import is_initialized as is_initialized

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]
