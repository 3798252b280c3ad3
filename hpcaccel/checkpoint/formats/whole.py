"""A whole training state as nested dicts of plain values, each tensor still to be read."""

from __future__ import annotations

from typing import Any

import torch

from hpcaccel.checkpoint.formats.ours import lazy, read_tensor
from hpcaccel.checkpoint.formats.weights import Weight
from hpcaccel.checkpoint.tree import unpack
from hpcaccel.checkpoint_files.contents import Contents

__all__ = ["whole_state"]


def whole_state(contents: Contents) -> dict[str, Any]:
    """``models`` and ``optimizers`` as their ``load_state_dict`` takes them, ``schedulers``, ``scaler``, ``objects``,
    ``ranks`` with what each rank had of its own, and ``manifest``."""
    tree, plain = contents.tree, _Plain(contents)
    return {
        "models": [None if model is None else plain(model) for model in tree["models"]],
        "optimizers": [_optimizer(optimizer, plain) for optimizer in tree["optimizers"]],
        "schedulers": [plain(item) for item in tree["schedulers"]],
        "scaler": plain(tree["scaler"]),
        "objects": {name: plain(item) for name, item in tree["objects"].items()},
        "ranks": {rank: plain(contents.of_rank(rank)) for rank in contents.ranks},
        "manifest": {key: value for key, value in contents.manifest.items() if key not in ("files", "crc32")},
    }


def _optimizer(saved: dict[str, Any], plain: _Plain) -> dict[str, Any]:
    """As torch has it: parameters by number, in the order of the groups."""
    names = [name for members in saved["members"] for name in members]
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[Any, Any] = {numbers[name]: plain(value) for name, value in saved["state"].items()}
    state |= dict(plain(saved["other"]))
    groups = [
        {**plain(group), "params": [numbers[name] for name in members], "param_names": list(members)}
        for group, members in zip(saved["groups"], saved["members"], strict=True)
    ]
    loose = {key: plain({"$": "tensor", "key": key}) for key in saved["loose"]}  # parameters that no model has
    return {**plain(saved["extra"]), "state": state, "param_groups": groups, **({"loose": loose} if loose else {})}


class _Plain:
    """Trees to values of types that torch's restricted loader knows."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._weights: dict[str, Any] = {}

    def __call__(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if "$" not in tree:
            return {key: self(item) for key, item in tree.items()}
        return self._typed(tree)

    def _typed(self, node: dict[str, Any]) -> Any:
        kind = node["$"]
        if kind == "tensor":
            key = node["key"]
            return self._weights.setdefault(key, lazy(self._contents, key, key))
        if kind in ("dict", "ordered_dict", "counter", "default_dict"):
            return {self(key): self(item) for key, item in node["items"]}
        if kind in ("set", "frozenset"):
            return {self(item) for item in node["items"]}
        if kind == "tuple":
            return tuple(self(item) for item in node["items"])
        if kind in ("deque", "size"):
            return [self(item) for item in node["items"]]
        value = unpack(node, lambda key: read_tensor(self._contents, key))
        if kind == "numpy_scalar":
            return _scalar(value)
        return self._array(node, value) if kind == "array" else value

    def _array(self, node: dict[str, Any], value: Any) -> Any:
        """A tensor where torch has such a dtype, else lists."""
        try:
            tensor = torch.from_numpy(value)
        except TypeError:
            return [_scalar(item) for item in value.reshape(-1)]
        return Weight(node["key"], tensor.dtype, tuple(tensor.shape), tensor.contiguous)


def _scalar(value: Any) -> Any:
    plain = value.item()
    return plain if isinstance(plain, bool | int | float | complex | str | bytes) else str(value)
