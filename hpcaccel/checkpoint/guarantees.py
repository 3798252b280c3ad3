"""What a resume guarantees: reasons why it is not bit-exact, and the source of each rank's random state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal

import torch

from hpcaccel.checkpoint.manifest_writer import processor
from hpcaccel.slurm.hostlist import ranks_text

__all__ = ["Guarantee", "describe_sources", "differences", "rank_sources"]

Guarantee = Literal["bit-exact", "state-exact"]
"""bit-exact: the training continues as if it had never stopped. state-exact: the state shared by all ranks is restored,
but batches, random numbers, the order of summation, or state that the script keeps itself may differ."""


def differences(content: dict[str, Any], *, world_size: int, mesh: dict[str, Any]) -> tuple[str, ...]:
    """Why a resume is not bit-exact: reasons from the save, and differences from the save that may change results."""
    if content.get("holds") == ["weights"]:
        return (f"contains only weights, imported from {content['imported_from']}: nothing else is restored",)
    now = {"world_size": world_size, "torch": torch.__version__, "processor": processor()}
    found = list(content.get("guarantee_reasons", ()))
    if content["guarantee"] == "bit-exact" and "guarantee_reasons" not in content:
        found.append("saved by an older version of hpcaccel, which did not check where the batches came from")
    found += [f"{key}: {content[key]} at the save, {value} now" for key, value in now.items() if content[key] != value]
    then = content.get("mesh")
    if then and mesh and _mesh_text(then) != _mesh_text(mesh) and content["world_size"] == world_size:
        found.append(f"mesh: {_mesh_text(then)} at the save, {_mesh_text(mesh)} now")
    if missing := content.get("missing_rng"):
        found.append(f"{ranks_text(missing)} did not take part in the save and saved no random state")
    return tuple(found)


def _mesh_text(mesh: dict[str, Any]) -> str:
    sizes = {name: size for name, size in sorted(mesh.items()) if name != "strategy" and size != 1}
    return " ".join([str(mesh.get("strategy", "")), *(f"{name} {size}" for name, size in sizes.items())])


def rank_sources(content: Mapping[str, Any], *, world_size: int, mesh: Mapping[str, Any]) -> tuple[int | None, ...]:
    """For each rank of this training, the rank whose saved per-rank state (mainly random state) it loads, or None.

    Usually, rank r loads the state of rank r. A rank that loads none seeds its generators from seed, data rank and
    step, so that two resumes from a checkpoint are identical. Ranks that work on one batch (tensor and context
    parallelism) must draw the same random numbers: if the sizes of these groups have changed since the save, all
    ranks of a group load one rank's state.

    Args:
        content: the checkpoint's manifest.
        mesh: layout of the ranks now (see ``TrainingState``).
    """
    saved, now = ([found.get(name, 1) for name in ("tensor", "context")] for found in (content.get("mesh") or {}, mesh))
    missing = content.get("missing_rng", ())
    found = (rank if saved == now else rank // prod(now) * prod(saved) for rank in range(world_size))
    return tuple(rank if rank < content["world_size"] and rank not in missing else None for rank in found)


def describe_sources(sources: Sequence[int | None], *, world_size: int) -> str:
    """The source of each rank's random state, for the log; empty if each rank continues with its own.

    Args:
        sources: see ``rank_sources``.
        world_size: the number of ranks that the checkpoint was saved with.
    """
    own = [rank for rank, source in enumerate(sources) if source == rank]
    new = [rank for rank, source in enumerate(sources) if source is None]
    left = sorted(set(range(world_size)) - set(sources))
    parts = [f"{ranks_text(own)}: own"] if own else []
    parts += [f"rank {rank}: from rank {source}" for rank, source in enumerate(sources) if source not in (None, rank)]
    if new:
        parts.append(f"{ranks_text(new)}: new (derived from seed, rank and step)")
    if left and len(sources) < world_size:
        parts.append(f"not used: those of {ranks_text(left)}")
    return "; ".join(parts) if len(own) < max(len(sources), world_size) else ""
