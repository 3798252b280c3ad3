"""Accelerate's import path of random number generators."""

from hpcaccel.runtime.compat.absent import __getattr__ as __getattr__
from hpcaccel.runtime.together.synchronised import synchronize_rng_state, synchronize_rng_states
from hpcaccel.runtime.training.determinism import set_seed

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]
