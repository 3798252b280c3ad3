"""Accelerate's import path for functions that create models on the meta device and load weights."""

from hpcaccel.runtime.checkpointing.load_model import load_checkpoint_in_model
from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.parallel.meta_device import init_empty_weights, init_on_device

__all__ = ["init_empty_weights", "init_on_device", "load_checkpoint_in_model"]
