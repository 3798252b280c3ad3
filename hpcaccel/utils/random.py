"""Accelerate's import path of random number generators."""

from hpcaccel.runtime.compat.unsupported import __getattr__ as __getattr__
from hpcaccel.runtime.distributed.collectives.synchronize_rng import synchronize_rng_state, synchronize_rng_states
from hpcaccel.runtime.training.determinism import set_seed

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]
