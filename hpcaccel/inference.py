"""Accelerate's import path for pipeline-parallel inference."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.pipeline.pipelined_batch import find_pippy_batch_size, pippy_forward
from hpcaccel.runtime.pipeline.pipelining import build_pipeline, prepare_pippy
from hpcaccel.runtime.pipeline.stage_split import generate_device_map

__all__ = ["build_pipeline", "find_pippy_batch_size", "generate_device_map", "pippy_forward", "prepare_pippy"]
