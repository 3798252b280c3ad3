"""States of this process's random generators, by Accelerate's keys."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpcaccel.errors import CheckpointError
from hpcaccel.runtime.distributed import device_backend

__all__ = ["generator_states", "restore_generators"]


def generator_states() -> dict[str, Any]:
    """The present states. XLA's are not included."""
    import numpy as np

    found: dict[str, Any] = {
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    kind = device_backend.accelerator()
    if kind not in ("cpu", "xla") and hasattr(module := torch.get_device_module(kind), "get_rng_state_all"):
        found[f"torch_{kind}_manual_seed"] = module.get_rng_state_all()
    return found


def restore_generators(path: Path, states: Mapping[str, Any]) -> None:
    """Set the generators to these states, which ``path`` contains.

    Raises:
        CheckpointError: states are missing, or invalid.
    """
    import numpy as np

    try:
        random.setstate(states["random_state"])
        np.random.set_state(states["numpy_random_seed"])
        torch.set_rng_state(states["torch_manual_seed"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not contain the states of the random generators: {error!r}") from error
    kind = device_backend.accelerator()
    # A key of another vendor's device has no counterpart here.
    if (saved := states.get(f"torch_{kind}_manual_seed")) is not None:
        torch.get_device_module(kind).set_rng_state_all(saved)
