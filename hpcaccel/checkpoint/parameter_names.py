"""The names of parameters, whatever the model is wrapped in.

A checkpoint calls a parameter ``layers.0.weight``, be the model plain, in DDP, compiled as a whole or in parts, or
sharded by FSDP2; so a run may go on with other wrappers.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcaccel.errors import CheckpointError

__all__ = ["parameter_names", "public_name"]

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Attributes under which torch.compile and activation checkpointing keep the module that they wrap."""


def public_name(model: nn.Module, key: str) -> str:
    """The name of a ``state_dict`` key without what wrappers have put into it."""
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
    """Every parameter with its name, ``<position of the model>.<public name>``; a shared one has its first name."""
    names: dict[nn.Parameter, str] = {}
    for position, model in enumerate(models):
        for key, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, f"{position}.{public_name(model, key)}")
    return names
