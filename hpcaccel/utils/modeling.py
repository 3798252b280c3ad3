"""Accelerate's import path of models' sizes and weights."""

from hpcaccel.runtime.checkpointing.load_model import load_checkpoint_in_model, load_state_dict
from hpcaccel.runtime.compat.model_introspection import find_tied_parameters, is_peft_model, retie_parameters
from hpcaccel.runtime.compat.model_size import (
    calculate_maximum_sizes,
    compute_module_sizes,
    convert_file_size_to_int,
    dtype_byte_size,
    id_tensor_storage,
    named_module_tensors,
)
from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__

__all__ = [
    "calculate_maximum_sizes",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "id_tensor_storage",
    "is_peft_model",
    "load_checkpoint_in_model",
    "load_state_dict",
    "named_module_tensors",
    "retie_parameters",
]
