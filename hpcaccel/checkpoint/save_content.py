"""A save's contents as tensors by key.

Values that are not tensors are packed into one JSON tree (see ``tree``), which is stored as a byte tensor under the key
``tree``; the tree of rank 3's own values is stored under ``tree.rank.3``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcaccel.checkpoint.optimizer_state import pack_optimizer
from hpcaccel.checkpoint.snapshot_memory import raw_bytes
from hpcaccel.checkpoint.training_state import (
    SHARED_TREE,
    TrainingState,
    buffers_of,
    parameter_names,
    public_name,
    rank_tree,
)
from hpcaccel.checkpoint.tree import PackedTree, pack, tensor_nodes
from hpcaccel.errors import CheckpointError

__all__ = ["FirstRank", "SaveContent", "collect"]


@dataclass(frozen=True)
class FirstRank:
    """Rank 0's parameters and buffers, which ``collect`` compares with those of the other ranks.

    Args:
        parameters: name, shape and dtype of each parameter, as text. They must be equal on all ranks.
        buffers: the digest of each unsharded buffer, by key. Buffers may differ between ranks.
    """

    parameters: frozenset[str]
    buffers: dict[str, str]

    @classmethod
    def of(cls, state: TrainingState) -> FirstRank:
        digests = {key: _digest(tensor) for key, tensor in buffers_of(state).items()}
        return cls(_described(parameter_names(state.models)), digests)


@dataclass(frozen=True)
class SaveContent:
    """What a rank may write.

    Args:
        tensors: by key, not copied.
        replicated: the keys of those tensors that are not distributed and that all ranks have.
    """

    tensors: dict[str, torch.Tensor]
    replicated: frozenset[str] = frozenset()


def collect(state: TrainingState, *, rank: int, first: FirstRank | None) -> SaveContent:
    """This rank's tensors.

    Every rank returns its own values (``state.per_rank``) as well as parameters, optimizer states and sharded tensors,
    so that the planner can distribute the writing. Only rank 0 returns the other values. Buffers that differ from rank
    0's (such as batch norm's running statistics) are saved for this rank too.

    Args:
        first: rank 0's parameters and buffers; None if there is only one rank.

    Raises:
        CheckpointError: a value cannot be saved, or this rank's parameters differ from rank 0's.
    """
    shared = _Collected(is_first=rank == 0)
    # Models come first: state_dict() makes FSDP2 register the sharded parameters.
    models = [
        None if position in state.without else _pack_model(model, f"models.{position}", shared)
        for position, model in enumerate(state.models)
    ]
    names = parameter_names(state.models)
    if first is not None and (other := first.parameters.symmetric_difference(_described(names))):
        raise CheckpointError(
            f"this rank and rank 0 have different parameters, for example {min(other)}: "
            "models split by layers (pipeline parallelism) cannot be saved yet"
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
    return SaveContent(tensors, frozenset(shared.replicated))


def _own_tensors(state: TrainingState, rank: int, first: FirstRank | None) -> dict[str, torch.Tensor]:
    """This rank's own values by key: their tree, and the tensors that it refers to."""
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
    """The tensors that this rank may write."""

    def __init__(self, *, is_first: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.replicated: set[str] = set()
        self._is_first = is_first

    def add(self, packed: PackedTree, from_all: set[str] | frozenset[str] = frozenset()) -> Any:
        """Add the tensors of ``packed`` that this rank may write, and return its tree with sharded tensors marked."""
        for key, tensor in packed.tensors.items():
            if isinstance(tensor, DTensor):
                _refuse_partial(tensor, key)
            elif key in from_all:
                self.replicated.add(key)
            if self._is_first or key in from_all or isinstance(tensor, DTensor):
                self.tensors[key] = tensor
        for node in tensor_nodes(packed.tree):
            if isinstance(packed.tensors.get(node["key"]), DTensor):
                node["sharded"] = True
        return packed.tree


def _pack_model(model: nn.Module, path: str, shared: _Collected) -> dict[str, Any]:
    """Pack a model's entries by public name. A tensor with several names is stored under the first."""
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
