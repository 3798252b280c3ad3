"""The ``__getattr__`` of the modules with Accelerate's import paths, by module: the error of a missing name."""

from __future__ import annotations

from hpcaccel.runtime.compat.unsupported import refusing_names_of

__all__ = [
    "big_modeling",
    "checkpointing",
    "data_loader",
    "hooks",
    "inference",
    "launchers",
    "local_sgd",
    "logging",
    "memory_utils",
    "optimizer",
    "parallelism_config",
    "scheduler",
    "state",
    "tracking",
]

big_modeling = refusing_names_of("hpcaccel.big_modeling")
checkpointing = refusing_names_of("hpcaccel.checkpointing")
data_loader = refusing_names_of("hpcaccel.data_loader")
hooks = refusing_names_of("hpcaccel.hooks")
inference = refusing_names_of("hpcaccel.inference")
launchers = refusing_names_of("hpcaccel.launchers")
local_sgd = refusing_names_of("hpcaccel.local_sgd")
logging = refusing_names_of("hpcaccel.logging")
memory_utils = refusing_names_of("hpcaccel.memory_utils")
optimizer = refusing_names_of("hpcaccel.optimizer")
parallelism_config = refusing_names_of("hpcaccel.parallelism_config")
scheduler = refusing_names_of("hpcaccel.scheduler")
state = refusing_names_of("hpcaccel.state")
tracking = refusing_names_of("hpcaccel.tracking")
