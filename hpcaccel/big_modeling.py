"""Accelerate's import path of models without memory of their own."""

from hpcaccel.runtime.absent import __getattr__ as __getattr__
from hpcaccel.runtime.meta_init import init_empty_weights, init_on_device
from hpcaccel.runtime.model_loading import load_checkpoint_in_model

__all__ = ["init_empty_weights", "init_on_device", "load_checkpoint_in_model"]
