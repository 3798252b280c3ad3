"""An optimizer's state by the names of its parameters, so that it does not hang on their order or numbers.

Taken from ``state_dict()`` and given back through ``load_state_dict()``, so that optimizers which override these, and
hooks, work. An optimizer that has made no step has no state, and none is made for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hpcaccel.checkpoint.manifest_writer import Index
from hpcaccel.checkpoint.tree import Packed, pack, tensor_nodes, unpack
from hpcaccel.errors import CheckpointError

__all__ = ["pack_optimizer", "restore_optimizer", "targets"]

_NOT_SAVED = {"params", "param_names"}
"""Keys of a parameter group that say which parameters it has: ``groups`` holds them by their public names."""


def pack_optimizer(optimizer: Optimizer, names: dict[nn.Parameter, str], path: str) -> tuple[Packed, set[str]]:
    """An optimizer as a tree, and the keys of the tensors that every rank offers to write (the others are rank 0's).

    Raises:
        CheckpointError: its state is of types that a tree does not know, or of a sharded parameter and not sharded.
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
    return Packed(tree, tensors), shared


def targets(
    optimizer: Optimizer, tree: Any, names: dict[nn.Parameter, str], path: str, index: Index
) -> dict[str, torch.Tensor]:
    """Tensors to read an optimizer's state into, placed and sharded as its parameters are now.

    Raises:
        CheckpointError: the optimizer has other parameters, or has them in other groups, than the saved one.
    """
    state_dict = optimizer.state_dict()
    by_name = {name: parameter for _, name, parameter in _parameters(optimizer, state_dict, names)}
    _compare_groups(optimizer, state_dict, tree, names, path)
    found: dict[str, torch.Tensor] = {}
    for name, saved in tree["state"].items():
        for node in tensor_nodes(saved):
            found[node["key"]] = _like(by_name[name], node, index)
    for name, parameter in by_name.items():
        if (key := f"{path}.loose.{name}") in tree["loose"]:
            found[key] = parameter.detach()
    return found


def restore_optimizer(
    optimizer: Optimizer, tree: Any, names: dict[nn.Parameter, str], tensor: Callable[[str], torch.Tensor]
) -> None:
    """Give an optimizer its saved state, hyperparameters included, every tensor in the dtype that it was saved in."""
    state_dict = optimizer.state_dict()
    numbers = {name: (number, parameter) for number, name, parameter in _parameters(optimizer, state_dict, names)}
    state = {numbers[name][0]: unpack(saved, tensor) for name, saved in tree["state"].items()}
    exact = [(numbers[name][1], state[numbers[name][0]]) for name in tree["state"]]
    state.update(unpack(tree["other"], tensor))
    groups = [
        {**unpack(saved, tensor), "params": group["params"]}
        for saved, group in zip(tree["groups"], state_dict["param_groups"], strict=True)
    ]
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict({**unpack(tree["extra"], tensor), "state": state, "param_groups": groups})
    for parameter, saved_state in exact:
        _undo_casts(optimizer.state.get(parameter, {}), saved_state)
    for group, old in zip(optimizer.param_groups, before, strict=True):
        _keep_tensors(group, old)


def _parameters(
    optimizer: Optimizer, state_dict: dict[str, Any], names: dict[nn.Parameter, str]
) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Each parameter's number in ``state_dict``, its name, and itself. One that no model has is called by its place."""
    for group, numbered in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, number in zip(group["params"], numbered["params"], strict=True):
            yield number, names.get(parameter, f"parameter {number}"), parameter


def _refuse_local_tensors(packed: Packed, parameter: nn.Parameter) -> None:
    """A plain tensor with the state of a shard differs from rank to rank, and nothing says how."""
    if not isinstance(parameter, DTensor):
        return
    for key, tensor in packed.tensors.items():
        if tensor.numel() > 1 and not isinstance(tensor, DTensor):
            raise CheckpointError(
                f"{key} is a plain tensor of shape {tuple(tensor.shape)} in the state of a sharded parameter: "
                "it cannot be told which part of the whole it is. Use an optimizer that keeps its state as DTensor"
            )


def _compare_groups(
    optimizer: Optimizer, state_dict: dict[str, Any], tree: Any, names: dict[nn.Parameter, str], path: str
) -> None:
    saved = tree["members"]
    if len(saved) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{path}: the checkpoint holds {len(saved)} parameter groups, this optimizer has "
            f"{len(optimizer.param_groups)}. Make the same groups before loading"
        )
    by_number = {number: name for number, name, _ in _parameters(optimizer, state_dict, names)}
    for position, (group, members) in enumerate(zip(state_dict["param_groups"], saved, strict=True)):
        here = {by_number[number] for number in group["params"]}
        for name in sorted(here.symmetric_difference(members)):
            where = "here and not in the checkpoint" if name in here else "in the checkpoint and not here"
            raise CheckpointError(f"{path}: parameter group {position} has {name!r} {where}")


def _like(parameter: nn.Parameter, node: dict[str, Any], index: Index) -> torch.Tensor:
    """An empty tensor for one entry of a parameter's state: as the parameter if it has its shape, else a plain one."""
    saved = index.tensor(node["key"])
    if len(saved.size) and tuple(saved.size) == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=saved.properties.dtype)
    device = parameter.device if node.get("device", "cpu") != "cpu" else torch.device("cpu")
    return torch.empty(saved.size, dtype=saved.properties.dtype, device=device)


def _undo_casts(state: dict[str, Any], saved: dict[str, Any]) -> None:
    """``load_state_dict`` casts state to its parameter's dtype: float32 moments of a bfloat16 parameter lose bits."""
    for key, value in saved.items():
        now = state.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
            state[key] = value.to(now.device)


def _keep_tensors(group: dict[str, Any], old: dict[str, Any]) -> None:
    """A learning rate that is a tensor stays the same object: schedulers and compiled steps hold on to it."""
    for key, value in old.items():
        now = group.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and value.shape == now.shape:
            with torch.no_grad():
                value.copy_(now)
            group[key] = value
