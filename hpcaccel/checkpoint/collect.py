"""A training taken apart: into tensors by key, and one tree that says how they belong together.

The tree is JSON and stored as a tensor of bytes, ``tree``; each rank's own as ``tree.rank.3``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcaccel.checkpoint.dcp_storage import raw_bytes
from hpcaccel.checkpoint.optimizer_state import pack_optimizer
from hpcaccel.checkpoint.parameter_names import parameter_names, public_name
from hpcaccel.checkpoint.training_state import SHARED_TREE, TrainingState, buffers_of, rank_tree
from hpcaccel.checkpoint.tree import Packed, pack, tensor_nodes
from hpcaccel.errors import CheckpointError

__all__ = ["FirstRank", "collect"]


@dataclass(frozen=True)
class FirstRank:
    """What the other ranks must know of rank 0 before they collect.

    Args:
        parameters: name, shape and dtype of each of its parameters, in words. All ranks must have the same.
        buffers: a digest of each of its buffers that is not sharded, by key. They may differ between ranks.
    """

    parameters: frozenset[str]
    buffers: dict[str, str]

    @classmethod
    def of(cls, state: TrainingState) -> FirstRank:
        digests = {key: _digest(tensor) for key, tensor in buffers_of(state).items()}
        return cls(_described(parameter_names(state.models)), digests)


def collect(state: TrainingState, *, rank: int, first: FirstRank | None) -> dict[str, torch.Tensor]:
    """This rank's tensors by key; nothing is copied.

    Parameters and optimizer states come from every rank, so that the planner can share out the writing. Whatever else
    is not sharded comes from rank 0 alone. Buffers that differ from rank 0's (the running statistics of batch norm,
    say) are kept for this rank too.

    Args:
        first: what rank 0 holds; None on a rank that is alone.

    Raises:
        CheckpointError: something is of a type that a checkpoint cannot hold, or this rank has another model.
    """
    shared = _Collected(is_first=rank == 0)
    # First the models: asking for their state makes FSDP2 show the sharded parameters.
    models = [
        None if position in state.without else _pack_model(model, f"models.{position}", shared)
        for position, model in enumerate(state.models)
    ]
    names = parameter_names(state.models)
    if first is not None and (other := first.parameters.symmetric_difference(_described(names))):
        raise CheckpointError(
            f"this rank and rank 0 do not hold the same parameters, {min(other)} for one: "
            "models that are split by layers (pipeline parallel) cannot be saved yet"
        )
    optimizers = []
    for position, optimizer in enumerate(state.optimizers):
        packed, from_all = pack_optimizer(optimizer, names, f"optimizers.{position}")
        optimizers.append(shared.add(packed, from_all))
    tree = {
        "models": models,
        "optimizers": optimizers,
        "schedulers": [
            shared.add(pack(scheduler.state_dict(), f"schedulers.{position}"))
            for position, scheduler in enumerate(state.schedulers)
        ],
        "scaler": None if state.scaler is None else shared.add(pack(state.scaler.state_dict(), "scaler")),
        "objects": {
            name: shared.add(pack(item.state_dict(), f"objects.{name}")) for name, item in state.objects.items()
        },
    }
    tensors = {**shared.tensors, **_own_tensors(state, rank, first)}
    if rank == 0:
        tensors[SHARED_TREE] = _to_bytes(tree)
    return tensors


def _own_tensors(state: TrainingState, rank: int, first: FirstRank | None) -> dict[str, torch.Tensor]:
    """What this rank alone has: its tree, and the tensors of that."""
    own = pack(state.per_rank, f"rank.{rank}")
    tensors = dict(own.tensors)
    buffers: dict[str, Any] = {}
    for key, tensor in buffers_of(state).items():
        if first is not None and first.buffers.get(key) != _digest(tensor):
            packed = pack(tensor, f"rank.{rank}.{key}")
            buffers[key] = packed.tree
            tensors.update(packed.tensors)
    tensors[rank_tree(rank)] = _to_bytes({"state": own.tree, "buffers": buffers})
    return tensors


class _Collected:
    """The tensors that this rank offers to write."""

    def __init__(self, *, is_first: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._is_first = is_first

    def add(self, packed: Packed, from_all: set[str] | frozenset[str] = frozenset()) -> Any:
        """Take what this rank may write of ``packed``; its tree."""
        for key, tensor in packed.tensors.items():
            if isinstance(tensor, DTensor):
                _refuse_partial(tensor, key)
            if self._is_first or key in from_all or isinstance(tensor, DTensor):
                self.tensors[key] = tensor
        for node in tensor_nodes(packed.tree):
            if isinstance(packed.tensors.get(node["key"]), DTensor):
                node["sharded"] = True
        return packed.tree


def _pack_model(model: nn.Module, path: str, shared: _Collected) -> dict[str, Any]:
    """A model's entries by public name. One tensor under several names is stored under the first."""
    tree: dict[str, Any] = {}
    stored: dict[int, Any] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        name = public_name(model, key)
        if id(value) in stored and isinstance(value, torch.Tensor):
            tree[name] = stored[id(value)]
            continue
        packed = pack(value, f"{path}.{name}")
        from_all = set(packed.tensors) if isinstance(value, nn.Parameter) else set()
        tree[name] = stored[id(value)] = shared.add(packed, from_all)
    return tree


def _described(names: dict[nn.Parameter, str]) -> frozenset[str]:
    return frozenset(f"{name} {tuple(item.shape)} {item.dtype}" for item, name in names.items())


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(raw_bytes(tensor), digest_size=16).hexdigest()


def _refuse_partial(tensor: DTensor, key: str) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{key} is a partial DTensor {tensor.placements}: reduce it before saving")


def _to_bytes(tree: Any) -> torch.Tensor:
    text = json.dumps(tree, separators=(",", ":")).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
