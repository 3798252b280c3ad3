"""Training state, the keys of its parts in a checkpoint, and the state of random generators.

Examples of keys: ``models.0.layers.0.weight``, ``optimizers.0.0.layers.0.weight['exp_avg']``,
``objects.sampler['order']``, ``rank.3['rng']['torch']``. A parameter has the same name whether the
model is plain, wrapped by DDP, compiled as a whole or in parts, or sharded by FSDP2, so a run may continue with other
wrappers.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcaccel.checkpoint.device_generator import device_generator
from hpcaccel.errors import CheckpointError

if TYPE_CHECKING:
    from hpcaccel.checkpoint.attached_files import AttachedFiles

__all__ = [
    "SHARED_TREE",
    "Stateful",
    "TrainingState",
    "buffers_of",
    "capture_rng",
    "fresh_rng",
    "parameter_names",
    "public_name",
    "rank_tree",
    "restore_rng",
]

SHARED_TREE = "tree"
"""Key of the tree shared by all ranks; rank 0 writes it."""
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Attributes in which torch.compile and activation checkpointing store the module that they wrap."""


class Stateful(Protocol):
    """An object with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass
class TrainingState:
    """What a save writes, and what a load restores in place.

    Args:
        models: plain modules, or modules wrapped by DDP, FSDP2 (``fully_shard``) or ``torch.compile``.
        optimizers: may also have parameters that belong to none of the models.
        schedulers: objects with ``state_dict`` and ``load_state_dict``, in the same order for the save and the load.
        scaler: a gradient scaler, or None.
        objects: further objects with these two methods, by name: data cursors, counters, objects that the user
            registered. Their state is equal on all ranks; rank 0's state is written.
        per_rank: this rank's own values, mainly random states; restored on the same rank. ``guarantees.rank_sources``
            describes what happens if the number of ranks changes.
        mesh: layout of the ranks, equal on all of them: ``strategy``, and the sizes of the dimensions ``replicate``,
            ``shard`` and ``tensor``; empty if unknown.
        without: positions of the models whose weights and buffers a hook saves or loads; equal on all ranks.
        attached: state that another library writes to and reads from files of its own; None if there is none.
    """

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Stateful] = field(default_factory=list)
    scaler: Stateful | None = None
    objects: dict[str, Stateful] = field(default_factory=dict)
    per_rank: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, Any] = field(default_factory=dict)
    without: frozenset[int] = frozenset()
    attached: AttachedFiles | None = None


def rank_tree(rank: int) -> str:
    """Key of the tree with one rank's own state."""
    return f"tree.rank.{rank}"


def buffers_of(state: TrainingState) -> dict[str, torch.Tensor]:
    """The models' persistent buffers that are not sharded, by key."""
    found: dict[str, torch.Tensor] = {}
    for position, model in enumerate(state.models):
        if position in state.without:
            continue
        for key, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter | DTensor):
                found[f"models.{position}.{public_name(model, key)}"] = value
    return found


# -- names


def public_name(model: nn.Module, key: str) -> str:
    """A ``state_dict`` key without the prefixes of wrappers.

    Raises:
        CheckpointError: the model is wrapped by FSDP1.
    """
    parts = []
    module: object = model
    for part in key.split("."):
        if part == "_fsdp_wrapped_module":
            raise CheckpointError(f"{key} belongs to FullyShardedDataParallel (FSDP1): use fully_shard (FSDP2) instead")
        wrapped = part in _WRAPPERS or (part == "module" and isinstance(module, DistributedDataParallel))
        if not wrapped:
            parts.append(part)
        module = getattr(module, part, None)
    return ".".join(parts)


def parameter_names(models: Iterable[nn.Module]) -> dict[nn.Parameter, str]:
    """Name of every parameter: ``<position of the model>.<public name>``. A shared parameter gets its first name."""
    names: dict[nn.Parameter, str] = {}
    for position, model in enumerate(models):
        for key, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, f"{position}.{public_name(model, key)}")
    return names


# -- random generators


def capture_rng(device: torch.device | str | None = None) -> dict[str, Any]:
    """State of this process's random generators: Python, numpy (if imported), torch's for the CPU and the device.

    Args:
        device: this rank's device. The state of its generator is stored under its kind, such as ``cuda``.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": struct.pack(f"<{len(words)}Q", *words), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    if device is not None and (generator := device_generator(device)) is not None:
        state[torch.device(device).type] = generator[0]()
    return state


def restore_rng(state: dict[str, Any], device: torch.device | str | None = None) -> None:
    """Set the generators to a state from ``capture_rng``.

    Args:
        device: this rank's device; its index may differ from that of the captured device.
    """
    python = state["python"]
    words = struct.unpack(f"<{len(python['words']) // 8}Q", python["words"])
    random.setstate((python["version"], words, python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    generator = device_generator(device)
    if device is not None and generator is not None and (kind := torch.device(device).type) in state:
        generator[1](state[kind].cpu())


def fresh_rng(seed: int, device: torch.device | str | None = None) -> dict[str, Any]:
    """Use ``seed`` to seed the generators that ``capture_rng`` captures, and return their state."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    return capture_rng(device)
