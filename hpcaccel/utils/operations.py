"""Accelerate's import path of what is done with nested tensors, and together."""

from hpcaccel.runtime.absent import __getattr__ as __getattr__
from hpcaccel.runtime.nested import honor_type, is_namedtuple, is_torch_tensor, recursively_apply
from hpcaccel.runtime.together import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "honor_type",
    "is_namedtuple",
    "is_torch_tensor",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
]
