"""Accelerate's import path of models without memory of their own."""

from hpcaccel.runtime.compat.absent import __getattr__ as __getattr__
from hpcaccel.runtime.parallel.meta_init import init_empty_weights, init_on_device
from hpcaccel.runtime.saving.model_loading import load_checkpoint_in_model

__all__ = ["init_empty_weights", "init_on_device", "load_checkpoint_in_model"]
