"""The states of all random number generators that a training step may draw from, and whose goes on on which rank.

Where as many ranks go on as there were, each goes on with its own. Where there are more or fewer, rank r goes on with
that of rank r; a rank that finds none gets one that follows from the seed, its number and the step, so that two resumes
of one checkpoint are alike; those of ranks that are no more are left behind. Ranks that share each tensor must draw
alike: where they are others than they were, they all go on with the state of one.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpcaccel.slurm.hostlist import ranks_text

__all__ = ["capture_rng", "describe_heirs", "fresh_rng", "heirs", "restore_rng"]


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


def fresh_rng(seed: int, device: torch.device | str | None = None) -> dict[str, Any]:
    """A state that follows from ``seed`` alone. The generators are left at it."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    return capture_rng(device)


def heirs(manifest: Mapping[str, Any], *, world_size: int, tensor: int = 1) -> tuple[int | None, ...]:
    """For each rank now the rank of then whose random state it goes on with; None: nobody's.

    Args:
        tensor: how many neighbouring ranks share each tensor now.
    """
    then = (manifest.get("mesh") or {}).get("tensor", 1)
    missing = manifest.get("missing_rng", ())
    found = (rank if then == tensor else rank // tensor * then for rank in range(world_size))
    return tuple(rank if rank < manifest["world_size"] and rank not in missing else None for rank in found)


def describe_heirs(inherited: Sequence[int | None], *, world_size: int) -> str:
    """Whose random states go on where, in words; empty where each rank goes on with its own.

    Args:
        inherited: see ``heirs``.
        world_size: the number of ranks when the checkpoint was saved.
    """
    own = [rank for rank, source in enumerate(inherited) if source == rank]
    new = [rank for rank, source in enumerate(inherited) if source is None]
    left = sorted(set(range(world_size)) - set(inherited))
    said = [f"own: {ranks_text(own)}"] if own else []
    said += [f"of rank {source}: rank {rank}" for rank, source in enumerate(inherited) if source not in (None, rank)]
    if new:
        said.append(f"new, from seed, rank and step: {ranks_text(new)}")
    if left and len(inherited) < world_size:
        said.append(f"left behind: {ranks_text(left)}")
    return "; ".join(said) if len(own) < max(len(inherited), world_size) else ""
