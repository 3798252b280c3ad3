"""Accelerate's import path of random number generators."""

from hpcaccel.runtime.absent import __getattr__ as __getattr__
from hpcaccel.runtime.determinism import set_seed
from hpcaccel.runtime.synchronised import synchronize_rng_state, synchronize_rng_states

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]
