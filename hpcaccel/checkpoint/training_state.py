"""What a training consists of, and what its parts are called in a checkpoint.

Keys are ``models.0.layers.0.weight``, ``optimizers.0.0.layers.0.weight['exp_avg']``, ``objects.sampler['order']``,
``rank.3['rng']``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpcaccel.checkpoint.parameter_names import public_name
from hpcaccel.checkpoint.rng import capture_rng, restore_rng

__all__ = [
    "SHARED_TREE",
    "Stateful",
    "TrainingState",
    "buffers_of",
    "capture_rng",
    "rank_tree",
    "restore_rng",
]

SHARED_TREE = "tree"
"""The key of the tree that all ranks share; rank 0's is written."""


class Stateful(Protocol):
    """Anything that gives its state and takes it back."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass
class TrainingState:
    """What is saved and restored in place.

    Args:
        models: plain modules, or wrapped by DDP, FSDP2 (``fully_shard``) or ``torch.compile``.
        optimizers: of these models' parameters.
        schedulers: anything with ``state_dict`` and ``load_state_dict``, in a fixed order.
        scaler: a gradient scaler, or None.
        objects: more of that kind by name: data cursors, counters, what the user registered. The same on all ranks;
            rank 0's are written.
        per_rank: what each rank has of its own, RNG states above all; comes back to the rank of the same number, and
            see ``rng.heirs`` where ranks share tensors otherwise than then.
        mesh: how the ranks are arranged, the same on all of them: ``strategy``, and the numbers ``replicate``,
            ``shard`` and ``tensor`` (ranks that share each tensor); empty where nobody knows.
        without: positions of models whose weights and buffers somebody else saves or loads; the same on all ranks.
    """

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Stateful] = field(default_factory=list)
    scaler: Stateful | None = None
    objects: dict[str, Stateful] = field(default_factory=dict)
    per_rank: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, Any] = field(default_factory=dict)
    without: frozenset[int] = frozenset()


def rank_tree(rank: int) -> str:
    """The key of a rank's own tree."""
    return f"tree.rank.{rank}"


def buffers_of(state: TrainingState) -> dict[str, torch.Tensor]:
    """The models' buffers that are not sharded, by key."""
    found: dict[str, torch.Tensor] = {}
    for position, model in enumerate(state.models):
        if position in state.without:
            continue
        for key, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter | DTensor):
                found[f"models.{position}.{public_name(model, key)}"] = value
    return found
