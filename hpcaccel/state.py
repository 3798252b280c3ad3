"""Accelerate's import path for the state classes; see ``hpcaccel.runtime.states``."""

from hpcaccel.runtime.compat.standalone import ThreadLocalSharedDict as ThreadLocalSharedDict
from hpcaccel.runtime.compat.standalone import do_nothing as do_nothing
from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.enums import DistributedType as DistributedType
from hpcaccel.runtime.states.accelerator_state import AcceleratorState as AcceleratorState
from hpcaccel.runtime.states.accelerator_state import is_initialized as is_initialized
from hpcaccel.runtime.states.gradient_state import GradientState as GradientState
from hpcaccel.runtime.states.partial_state import PartialState as PartialState

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "PartialState",
    "ThreadLocalSharedDict",
    "do_nothing",
    "is_initialized",
]
