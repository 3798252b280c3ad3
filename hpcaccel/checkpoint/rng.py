"""The states of all random number generators that a training step may draw from."""

from __future__ import annotations

import random
import struct
import sys
from typing import Any

import torch

__all__ = ["capture_rng", "restore_rng"]


def capture_rng(device: torch.device | str | None = None) -> dict[str, Any]:
    """This process's generators as a tree: Python's, numpy's (where it is imported), torch's CPU one, and the GPU's.

    Args:
        device: the device that this rank computes on; its generator is captured when it is a CUDA device.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": struct.pack(f"<{len(words)}Q", *words), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    if device is not None and torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: dict[str, Any], device: torch.device | str | None = None) -> None:
    """Put the generators back to where ``capture_rng`` found them.

    Args:
        device: this rank's device; it may have another number than when the state was captured.
    """
    python = state["python"]
    words = struct.unpack(f"<{len(python['words']) // 8}Q", python["words"])
    random.setstate((python["version"], words, python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "cuda" in state and device is not None and torch.device(device).type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
