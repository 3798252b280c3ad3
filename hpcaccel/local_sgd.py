"""Accelerate's import path of local SGD."""

from hpcaccel.runtime.training.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
