"""Accelerate's import path of files, models and odds and ends."""

from hpcaccel.runtime.checkpointing.export_model import clean_state_dict_for_safetensors
from hpcaccel.runtime.checkpointing.model_functions import compile_regions, extract_model_from_parallel, load, save
from hpcaccel.runtime.compat.introspection import get_pretty_name, merge_dicts, recursive_getattr
from hpcaccel.runtime.compat.machine_info import check_os_kernel, is_port_in_use
from hpcaccel.runtime.compat.model_introspection import (
    get_module_children_bottom_up,
    has_compiled_regions,
    is_compiled_module,
    model_has_dtensor,
)
from hpcaccel.runtime.compat.model_size import convert_bytes
from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.distributed.collectives.functions import wait_for_everyone

__all__ = [
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_module_children_bottom_up",
    "get_pretty_name",
    "has_compiled_regions",
    "is_compiled_module",
    "is_port_in_use",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
    "wait_for_everyone",
]
