"""Accelerate's import path of what is done with nested tensors, and together."""

from hpcaccel.errors import DistributedOperationException
from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.distributed.collectives.functions import (
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from hpcaccel.runtime.distributed.collectives.nested_ops import (
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    find_device,
    get_data_structure,
    ignorant_find_batch_size,
    initialize_tensors,
    is_tensor_information,
    listify,
    send_to_device,
    slice_tensors,
)
from hpcaccel.runtime.distributed.collectives.nested_tensors import (
    honor_type,
    is_namedtuple,
    is_torch_tensor,
    recursively_apply,
)
from hpcaccel.runtime.distributed.collectives.padding import pad_input_tensors

__all__ = [
    "DistributedOperationException",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "get_data_structure",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]
