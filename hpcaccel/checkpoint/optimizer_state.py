"""Optimizer state by parameter name, independent of the order and the numbers of the models' parameters.

The state is read through ``state_dict()`` and restored through ``load_state_dict()``, so hooks and optimizers that
override these methods work. No state is created for an optimizer that has not taken a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpcaccel.checkpoint.chunk_targets import empty_aligned
from hpcaccel.checkpoint.manifest_writer import Index
from hpcaccel.checkpoint.tree import TYPE, PackedTree, pack, tensor_nodes, unpack
from hpcaccel.errors import CheckpointError

__all__ = ["load_exactly", "pack_optimizer", "restore_optimizer", "targets"]

_NOT_SAVED = {"params", "param_names"}
"""Keys of a parameter group that list its parameters; the parameters are saved by public name, in ``members``."""


def pack_optimizer(optimizer: Optimizer, names: dict[nn.Parameter, str], path: str) -> tuple[PackedTree, set[str]]:
    """Pack an optimizer into a tree.

    Returns:
        The packed tree, and the set of keys of the tensors that any rank may write. Only rank 0 writes the other
        unsharded tensors.

    Raises:
        CheckpointError: the state contains an unsupported type, or a plain tensor for a sharded parameter.
    """
    state_dict = optimizer.state_dict()
    by_id = {number: (name, parameter) for number, name, parameter in _parameters(optimizer, state_dict, names)}
    tensors: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {}
    other: list[Any] = []
    for number, value in state_dict["state"].items():
        if number not in by_id:
            other.append([number, value])
            continue
        name, parameter = by_id[number]
        packed = pack(value, f"{path}.{name}")
        _refuse_local_tensors(packed, parameter)
        state[name] = packed.tree
        tensors.update(packed.tensors)
    shared = set(tensors)
    groups = [{key: value for key, value in group.items() if key not in _NOT_SAVED} for group in optimizer.param_groups]
    members = [[by_id[number][0] for number in group["params"]] for group in state_dict["param_groups"]]
    extra = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
    rest = pack({"groups": groups, "other": other, "extra": extra}, path)
    loose = {f"{path}.loose.{name}": parameter.detach() for name, parameter in by_id.values() if parameter not in names}
    tensors.update(rest.tensors)
    tensors.update(loose)
    tree = {"state": state, "members": members, "loose": sorted(loose), **rest.tree}
    return PackedTree(tree, tensors), shared


def targets(
    optimizer: Optimizer, tree: Any, names: dict[nn.Parameter, str], path: str, index: Index
) -> dict[str, torch.Tensor]:
    """Tensors to read into, by key: the optimizer's parameters that are in no model, and for the state of all its
    parameters the existing tensors if they have the saved layout (see ``_can_hold``), else new ones (see ``_like``).

    Raises:
        CheckpointError: the optimizer's parameters or groups differ from the saved ones.
    """
    state_dict = optimizer.state_dict()
    numbers = {name: (number, parameter) for number, name, parameter in _parameters(optimizer, state_dict, names)}
    by_name = {name: parameter for name, (_, parameter) in numbers.items()}
    _compare_groups(optimizer, state_dict, tree, names, path)
    found: dict[str, torch.Tensor] = {}
    taken = {_storage(parameter) for parameter in [*names, *by_name.values()]}
    for name, saved in tree["state"].items():
        number, parameter = numbers[name]
        current = _entries(saved, state_dict["state"].get(number))
        for node in tensor_nodes(saved):
            now = current.get(node["key"])
            if now is not None and _can_hold(now, parameter, index.tensor(node["key"])) and _storage(now) not in taken:
                taken.add(_storage(now))
                found[node["key"]] = now
            else:
                found[node["key"]] = _like(parameter, node, index)
    for name, parameter in by_name.items():
        if (key := f"{path}.loose.{name}") in tree["loose"]:
            found[key] = parameter.detach()
    return found


def restore_optimizer(
    optimizer: Optimizer, tree: Any, names: dict[nn.Parameter, str], tensor: Callable[[str], torch.Tensor]
) -> None:
    """Restore an optimizer's state and hyperparameters. State tensors keep the dtypes with which they were saved."""
    state_dict = optimizer.state_dict()
    numbers = {name: (number, parameter) for number, name, parameter in _parameters(optimizer, state_dict, names)}
    state = {numbers[name][0]: unpack(saved, tensor) for name, saved in tree["state"].items()}
    exact = [(numbers[name][1], state[numbers[name][0]]) for name in tree["state"]]
    state.update(unpack(tree["other"], tensor))
    groups = [
        {**unpack(saved, tensor), "params": group["params"]}
        for saved, group in zip(tree["groups"], state_dict["param_groups"], strict=True)
    ]
    load_exactly(optimizer, {**unpack(tree["extra"], tensor), "state": state, "param_groups": groups}, exact)


def load_exactly(
    optimizer: Optimizer, state_dict: dict[str, Any], saved: Iterable[tuple[torch.Tensor, dict[str, Any]]]
) -> None:
    """``load_state_dict``, without changes of dtypes, and with the same tensors as hyperparameters as before.

    Args:
        saved: for each parameter, its saved state.
    """
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state_dict)
    for parameter, saved_state in saved:
        _undo_casts(optimizer.state.get(parameter, {}), saved_state)
    for group, old in zip(optimizer.param_groups, before, strict=True):
        _keep_tensors(group, old)


def _parameters(
    optimizer: Optimizer, state_dict: dict[str, Any], names: dict[nn.Parameter, str]
) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Yields, for each parameter, its number in ``state_dict``, its name and the parameter itself. A parameter that is
    in no model is named ``parameter <number>``."""
    for group, numbered in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, number in zip(group["params"], numbered["params"], strict=True):
            yield number, names.get(parameter, f"parameter {number}"), parameter


def _refuse_local_tensors(packed: PackedTree, parameter: nn.Parameter) -> None:
    """Reject plain tensors with several elements in the state of a sharded parameter.

    Raises:
        CheckpointError: there is such a tensor. It differs between ranks, and its offset in the full state is unknown.
    """
    if not isinstance(parameter, DTensor):
        return
    for key, tensor in packed.tensors.items():
        if tensor.numel() > 1 and not isinstance(tensor, DTensor):
            raise CheckpointError(
                f"{key} is a plain tensor of shape {tuple(tensor.shape)} in the state of a sharded parameter: hpcaccel "
                "cannot determine which part of the full tensor it is. Use an optimizer that keeps its state as DTensor"
            )


def _compare_groups(
    optimizer: Optimizer, state_dict: dict[str, Any], tree: Any, names: dict[nn.Parameter, str], path: str
) -> None:
    saved = tree["members"]
    if len(saved) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{path}: number of parameter groups: {len(saved)} in the checkpoint, {len(optimizer.param_groups)} in "
            "this optimizer. Create the same groups before loading"
        )
    by_number = {number: name for number, name, _ in _parameters(optimizer, state_dict, names)}
    for position, (group, members) in enumerate(zip(state_dict["param_groups"], saved, strict=True)):
        here = {by_number[number] for number in group["params"]}
        for name in sorted(here.symmetric_difference(members)):
            where = "only in this optimizer" if name in here else "only in the checkpoint"
            raise CheckpointError(f"{path}: parameter group {position} has {name!r} {where}")


def _entries(saved: Any, state: Any) -> dict[str, torch.Tensor]:
    """The tensors of a parameter's present state by the keys of the saved entries with the same names."""
    if not isinstance(saved, dict) or not isinstance(state, dict):
        return {}
    pairs = [(node, state.get(entry)) for entry, node in saved.items()]
    return {
        node["key"]: now.detach()
        for node, now in pairs
        if isinstance(now, torch.Tensor) and isinstance(node, dict) and node.get(TYPE) == "tensor"
    }


def _can_hold(now: torch.Tensor, parameter: torch.Tensor, saved: TensorStorageMetadata) -> bool:
    """Whether the saved entry can be read into the tensor ``now``: it has the shape of the parameter, and its dtype,
    device and sharding are those of a new tensor. Allocating new memory takes longer than reading into it."""
    plain, like = type(now) in (torch.Tensor, DTensor), parameter.detach()
    if not plain or now.dtype != saved.properties.dtype or not len(saved.size):
        return False
    if not tuple(now.shape) == tuple(like.shape) == tuple(saved.size) or now.device != like.device:
        return False
    if isinstance(now, DTensor) != isinstance(like, DTensor):
        return False
    if isinstance(now, DTensor) and isinstance(like, DTensor):
        same = now.device_mesh == like.device_mesh and now.placements == like.placements
        if not same:
            return False
    return now.stride() == like.stride() and _local(now).is_contiguous() and _storage(now) != 0


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storage(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage; 0 if it has no memory, or no address."""
    if tensor.device.type in ("meta", "xla"):
        return 0
    try:
        return _local(tensor.detach()).untyped_storage().data_ptr()
    except RuntimeError:  # devices that keep their data elsewhere
        return 0


def _like(parameter: nn.Parameter, node: dict[str, Any], index: Index) -> torch.Tensor:
    """An uninitialised tensor for one saved entry of a parameter's state. If the entry has the shape of the parameter,
    the tensor has the parameter's device and sharding. Otherwise it is unsharded, and on the CPU if the saved entry was
    on the CPU."""
    saved = index.tensor(node["key"])
    if len(saved.size) and tuple(saved.size) == tuple(parameter.shape):
        return empty_aligned(parameter.detach(), node["key"], index)
    device = parameter.device if node.get("device", "cpu") != "cpu" else torch.device("cpu")
    return torch.empty(saved.size, dtype=saved.properties.dtype, device=device)


def _undo_casts(state: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restore saved dtypes: ``load_state_dict`` casts state to the parameter's dtype, so float32 moments lose bits."""
    for key, value in saved.items():
        now = state.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
            state[key] = value.to(now.device)


def _keep_tensors(group: dict[str, Any], old: dict[str, Any]) -> None:
    """Copy tensor hyperparameters into the old tensors: schedulers and compiled steps hold references to them."""
    for key, value in old.items():
        now = group.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and value.shape == now.shape:
            with torch.no_grad():
                value.copy_(now)
            group[key] = value
