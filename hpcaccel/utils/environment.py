"""Accelerate's import path of environment variables and the machine."""

from hpcaccel.runtime.compat.environ import (
    clear_environment,
    convert_dict_to_env_variables,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    str_to_bool,
)
from hpcaccel.runtime.compat.introspection import are_libraries_initialized
from hpcaccel.runtime.compat.machine_info import check_cuda_fp8_capability, get_current_device_type
from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__

__all__ = [
    "are_libraries_initialized",
    "check_cuda_fp8_capability",
    "clear_environment",
    "convert_dict_to_env_variables",
    "get_current_device_type",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "str_to_bool",
]
