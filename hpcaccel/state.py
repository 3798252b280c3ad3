"""Accelerate's import path of the states, which live in ``hpcaccel.runtime.distributed.process_states``."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.distributed.process_states import AcceleratorState as AcceleratorState
from hpcaccel.runtime.distributed.process_states import GradientState as GradientState
from hpcaccel.runtime.distributed.process_states import PartialState as PartialState
from hpcaccel.runtime.distributed.process_states import is_initialized as is_initialized
from hpcaccel.runtime.enums import DistributedType as DistributedType

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]
