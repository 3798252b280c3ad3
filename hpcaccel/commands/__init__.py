"""Accelerate's import path for commands: the launcher, the configuration file and the memory estimate as functions.
Importing another name raises an error that names the replacements.

The submodules (``launch``, ``config`` and others) have no files: ``hpcaccel.runtime.compat.import_paths`` creates them
when they are imported. Those that are programs can be started: ``python -m hpcaccel.commands.launch``.
"""

from hpcaccel.launch.launch_function import launch_command, launch_command_parser
from hpcaccel.runtime.compat.config_file import (
    ClusterConfig,
    default_config_file,
    default_json_config_file,
    default_yaml_config_file,
    load_config_from_file,
    write_basic_config,
)
from hpcaccel.runtime.compat.import_paths import find_in_commands as __getattr__  # noqa: F401
from hpcaccel.runtime.compat.model_estimate import (
    check_has_model,
    create_empty_model,
    estimate_command,
    estimate_command_parser,
    estimate_training_usage,
    gather_data,
)

__all__ = [
    "ClusterConfig",
    "check_has_model",
    "create_empty_model",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "estimate_command",
    "estimate_command_parser",
    "estimate_training_usage",
    "gather_data",
    "launch_command",
    "launch_command_parser",
    "load_config_from_file",
    "write_basic_config",
]
