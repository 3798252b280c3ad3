"""Accelerate's import path for functions that create models on the meta device and load weights."""

from hpcaccel.runtime.checkpointing.load_model import load_checkpoint_in_model
from hpcaccel.runtime.compat.missing_names import big_modeling as __getattr__  # noqa: F401
from hpcaccel.runtime.parallel.meta_device import init_empty_weights, init_on_device

__all__ = ["init_empty_weights", "init_on_device", "load_checkpoint_in_model"]
