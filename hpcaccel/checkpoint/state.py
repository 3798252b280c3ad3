"""What a training consists of, taken apart into tensors by key and one tree, and put back in place.

Keys are ``models.0.layers.0.weight``, ``optimizers.0.0.layers.0.weight['exp_avg']``, ``objects.sampler['order']``,
``rank.3['torch']``. The trees are tensors too, of bytes: ``tree`` (shared, rank 0's) and ``tree.rank.3``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpcaccel.checkpoint.manifest import Index
from hpcaccel.checkpoint.names import parameter_names, public_name
from hpcaccel.checkpoint.optimizer import pack_optimizer, restore_optimizer, targets
from hpcaccel.checkpoint.rng import capture_rng, restore_rng
from hpcaccel.checkpoint.storage import raw_bytes
from hpcaccel.checkpoint.tree import Packed, pack, tensor_nodes, unpack
from hpcaccel.errors import CheckpointError

__all__ = [
    "SHARED_TREE",
    "Restorer",
    "Stateful",
    "TrainingState",
    "capture_rng",
    "collect",
    "rank_tree",
    "restore_rng",
]

log = logging.getLogger(__name__)

SHARED_TREE = "tree"


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
        per_rank: what each rank has of its own, RNG states above all; comes back only to the rank of the same number.
    """

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Stateful] = field(default_factory=list)
    scaler: Stateful | None = None
    objects: dict[str, Stateful] = field(default_factory=dict)
    per_rank: dict[str, Any] = field(default_factory=dict)


def rank_tree(rank: int) -> str:
    """The key of a rank's own tree."""
    return f"tree.rank.{rank}"


# -- saving ---------------------------------------------------------------------------------------------------------


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
        digests = {key: _digest(tensor) for key, tensor in _buffers(state).items()}
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
    models = [_pack_model(model, f"models.{position}", shared) for position, model in enumerate(state.models)]
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
    own = pack(state.per_rank, f"rank.{rank}")
    known = first.buffers if first is not None else None
    differing = {
        key: tensor
        for key, tensor in _buffers(state).items()
        if known is not None and known.get(key) != _digest(tensor)
    }
    buffers = {key: pack(tensor, f"rank.{rank}.{key}") for key, tensor in differing.items()}
    own_tree = {"state": own.tree, "buffers": {key: packed.tree for key, packed in buffers.items()}}
    tensors = {**shared.tensors, **own.tensors, rank_tree(rank): _to_bytes(own_tree)}
    for packed in buffers.values():
        tensors.update(packed.tensors)
    if rank == 0:
        tensors[SHARED_TREE] = _to_bytes(tree)
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


def _buffers(state: TrainingState) -> dict[str, torch.Tensor]:
    """The models' buffers that are not sharded, by key."""
    found: dict[str, torch.Tensor] = {}
    for position, model in enumerate(state.models):
        for key, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter | DTensor):
                found[f"models.{position}.{public_name(model, key)}"] = value
    return found


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(raw_bytes(tensor), digest_size=16).hexdigest()


def _refuse_partial(tensor: DTensor, key: str) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{key} is a partial DTensor {tensor.placements}: reduce it before saving")


def _to_bytes(tree: Any) -> torch.Tensor:
    text = json.dumps(tree, separators=(",", ":")).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# -- loading --------------------------------------------------------------------------------------------------------


class Restorer:
    """Puts a checkpoint into a ``TrainingState``: first ``targets``, which are then read, then ``apply``.

    Args:
        tree: the shared tree.
        own: this rank's own tree, None where the checkpoint has none for this rank.
        own_buffers: whether this rank takes its own buffers back. Only at the same world size: at another, some ranks
            would have none, so all take rank 0's.
        index: dtypes and shapes of the stored tensors.
    """

    def __init__(self, state: TrainingState, *, tree: Any, own: Any, own_buffers: bool, index: Index) -> None:
        self._state = state
        self._tree = tree
        self._own = None if own is None else own["state"]
        self._own_buffers: dict[str, Any] = own["buffers"] if own is not None and own_buffers else {}
        self._index = index
        self._tensors: dict[str, torch.Tensor] = {}
        self._models = [model.state_dict() for model in state.models]
        self._names = parameter_names(state.models)

    def targets(self) -> dict[str, torch.Tensor]:
        """Tensors to read into, by key: the models' own, and new ones for everything else.

        Raises:
            CheckpointError: the checkpoint is of another model, optimizer or set of objects; all differences that
                were found in one of them are named.
        """
        self._compare()
        for position, (model, current) in enumerate(zip(self._state.models, self._models, strict=True)):
            self._target_model(model, current, self._tree["models"][position], f"models.{position}")
        for position, optimizer in enumerate(self._state.optimizers):
            path = f"optimizers.{position}"
            saved = self._tree["optimizers"][position]
            self._tensors.update(targets(optimizer, saved, self._names, path, self._index))
        for item, saved, path in self._stateful():
            templates = {}
            if any("sharded" in node for node in tensor_nodes(saved)):
                templates = pack(item.state_dict(), path).tensors
            self._target_plain(saved, templates)
        self._target_plain([self._tree["optimizers"], self._own, self._own_buffers], {})
        return self._tensors

    def apply(self) -> dict[str, Any] | None:
        """Hand the tensors that were read to their owners; this rank's own tree, or None."""
        with torch.no_grad():
            for model, current, saved in zip(self._state.models, self._models, self._tree["models"], strict=True):
                model.load_state_dict(
                    {key: self._model_entry(model, key, value, saved) for key, value in current.items()}
                )
            buffers = _buffers(self._state) if self._own_buffers else {}
            for key, node in self._own_buffers.items():
                buffers[key].copy_(unpack(node, self._tensor))
        for optimizer, saved in zip(self._state.optimizers, self._tree["optimizers"], strict=True):
            restore_optimizer(optimizer, saved, self._names, self._tensor)
        for item, saved, _ in self._stateful():
            item.load_state_dict(unpack(saved, self._tensor))
        own: dict[str, Any] | None = None if self._own is None else unpack(self._own, self._tensor)
        return own

    def _tensor(self, key: str) -> torch.Tensor:
        return self._tensors[key]

    def _model_entry(self, model: nn.Module, key: str, current: Any, saved: dict[str, Any]) -> Any:
        value = unpack(saved[public_name(model, key)], self._tensor)
        shared = isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor) and value.shape == current.shape
        if shared and value is not current:
            return current.copy_(value)  # another name of a tensor that was one with it when it was saved
        return value

    def _stateful(self) -> list[tuple[Stateful, Any, str]]:
        """Each scheduler, the scaler and each object, with its saved tree and its path."""
        found = [
            (scheduler, self._tree["schedulers"][position], f"schedulers.{position}")
            for position, scheduler in enumerate(self._state.schedulers)
        ]
        if self._state.scaler is not None and self._tree["scaler"] is not None:
            found.append((self._state.scaler, self._tree["scaler"], "scaler"))
        found += [(item, self._tree["objects"][name], f"objects.{name}") for name, item in self._state.objects.items()]
        return found

    def _compare(self) -> None:
        for kind in ("models", "optimizers", "schedulers"):
            here, saved = len(getattr(self._state, kind)), len(self._tree[kind])
            if here != saved:
                raise CheckpointError(f"the checkpoint holds {saved} {kind}, here there are {here}")
        missing = sorted(set(self._state.objects) - set(self._tree["objects"]))
        unknown = sorted(set(self._tree["objects"]) - set(self._state.objects))
        if missing or unknown:
            raise CheckpointError(
                f"registered objects differ: not in the checkpoint: {missing or 'none'}; only in the checkpoint: "
                f"{unknown or 'none'}. Register the same ones before loading"
            )
        if (self._state.scaler is None) != (self._tree["scaler"] is None):
            where = "here and not in the checkpoint" if self._state.scaler else "in the checkpoint and not here"
            log.warning("there is a gradient scaler %s; its state is passed over", where)

    def _target_model(self, model: nn.Module, current: dict[str, Any], saved: dict[str, Any], path: str) -> None:
        here = {public_name(model, key): value for key, value in current.items()}
        problems = [f"{path}.{name} is not in the checkpoint" for name in here if name not in saved]
        problems += [f"{path}.{name} is only in the checkpoint" for name in saved if name not in here]
        for name in here.keys() & saved.keys():
            problems += self._target_entry(here[name], saved[name], f"{path}.{name}")
        if problems:
            more = f"\n  … and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise CheckpointError(
                f"the checkpoint is of another model: {len(problems)} differences\n  "
                + "\n  ".join(sorted(problems)[:8])
                + more
            )

    def _target_entry(self, current: Any, saved: Any, name: str) -> list[str]:
        """Where one entry of a model is read to, or what is wrong with it."""
        is_tensor = isinstance(current, torch.Tensor) and isinstance(saved, dict) and saved.get("$") == "tensor"
        if not is_tensor or name.endswith("._extra_state"):  # extra state may be anything, at any time
            self._target_plain(saved, {})
            return []
        stored = self._index.tensor(saved["key"])
        if tuple(stored.size) != tuple(current.shape):
            return [f"{name} has shape {tuple(stored.size)} in the checkpoint, {tuple(current.shape)} here"]
        if stored.properties.dtype != current.dtype:
            return [f"{name} is {stored.properties.dtype} in the checkpoint, {current.dtype} here"]
        self._tensors.setdefault(saved["key"], current)
        return []

    def _target_plain(self, tree: Any, templates: dict[str, torch.Tensor]) -> None:
        """New tensors for what nobody holds in memory yet: sharded as their template, else whole."""
        for node in tensor_nodes(tree):
            key = node["key"]
            if key in self._tensors:
                continue
            stored = self._index.tensor(key)
            template = templates.get(key)
            if isinstance(template, DTensor) and tuple(template.shape) == tuple(stored.size):
                self._tensors[key] = torch.empty_like(template, dtype=stored.properties.dtype)
            else:
                device = _device(node.get("device", "cpu"))
                self._tensors[key] = torch.empty(stored.size, dtype=stored.properties.dtype, device=device)


def _device(kind: str) -> torch.device:
    """The device of that kind that this process uses, or the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if kind == "cuda" and torch.cuda.is_available()
        else torch.device("cpu")
    )
