"""Nested Python values as typed JSON, with tensors and arrays stored separately.

``pack`` converts a value to a tree of plain JSON and a dict of its tensors by key; ``unpack`` converts both back to an
equal value of the same types, except that a Parameter becomes a tensor. Unlike a pickle, a tree runs no code when it is
read. Saving a value of an unsupported type raises an error with the path to the value.

None, bool, str, int (up to 4096 bits), finite float, list, and dict with str keys but without a key ``"$"`` become the
equivalent JSON value. Any other value becomes an object whose key ``"$"`` names the type.
"""

from __future__ import annotations

import base64
import collections
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpcaccel.errors import CheckpointError

__all__ = ["PackedTree", "pack", "tensor_nodes", "unpack"]

TYPE = "$"
MAX_INLINE_BYTES = 1024
"""A longer ``bytes`` value is stored as a tensor instead of in the JSON."""
MAX_INLINE_INT_BITS = 4096
"""A longer int is written in hexadecimal, because Python limits the number of decimal digits that it converts."""

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_FACTORIES: dict[str, type] = {"int": int, "float": float, "str": str, "list": list, "dict": dict, "set": set}
"""Factories with which a ``defaultdict`` can be saved."""
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "ordered_dict",
    collections.Counter: "counter",
    collections.defaultdict: "default_dict",
}
_TENSORS: set[type] = {torch.Tensor, torch.nn.Parameter, DTensor}
"""Types of tensors that are saved. Other subclasses of Tensor have state that would be lost."""
_SEQUENCES: dict[type, str] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    collections.deque: "deque",
    torch.Size: "size",
}


@dataclass
class PackedTree:
    """A packed value: ``tree`` is plain JSON, ``tensors`` are the tensors that its nodes refer to."""

    tree: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype with this name.

    Raises:
        CheckpointError: this version of torch has no such dtype.
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise CheckpointError(f"torch {torch.__version__} has no dtype {name!r}") from None


def pack(value: Any, path: str) -> PackedTree:
    """Convert ``value`` to a tree. Tensors are not copied.

    Args:
        path: name of the value in error messages, and prefix of the keys of its tensors.

    Raises:
        CheckpointError: a value cannot be saved (for example because of its type), or contains itself.
    """
    packer = _Packer()
    tree = packer.pack(value, path)
    return PackedTree(tree, packer.tensors)


def unpack(tree: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Convert a tree back to its value; ``tensor`` returns the tensor for a key."""
    if isinstance(tree, list):
        return [unpack(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if TYPE not in tree:
        return {key: unpack(item, tensor) for key, item in tree.items()}
    return _unpack_typed(tree, tensor)


def tensor_nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """All nodes of a tree that name a stored tensor in ``key``. Nodes of type ``tensor`` also have ``device``."""
    if isinstance(tree, list):
        for item in tree:
            yield from tensor_nodes(item)
    elif isinstance(tree, dict):
        if TYPE in tree and "key" in tree:
            yield tree
        else:
            for item in tree.values():
                yield from tensor_nodes(item)


class _Packer:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._open: set[int] = set()

    def pack(self, value: Any, path: str) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if value.bit_length() <= MAX_INLINE_INT_BITS else {TYPE: "int", "hex": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {TYPE: "float", "hex": struct.pack(">d", value).hex()}
        if kind is complex:
            return {TYPE: "complex", "hex": struct.pack(">dd", value.real, value.imag).hex()}
        if kind in (bytes, bytearray):
            return self._bytes(kind.__name__, bytes(value), path)
        if kind is torch.dtype:
            return {TYPE: "dtype", "name": dtype_name(value)}
        if kind is torch.device:
            return {TYPE: "device", "name": str(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is list or kind in _SEQUENCES or kind in _MAPPINGS:
            return self._container(value, path)
        if kind.__module__ == "numpy":
            return self._numpy(value, path)
        raise _unsupported(value, path)

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._open:
            raise CheckpointError(f"{path} contains itself: circular references cannot be saved")
        self._open.add(id(value))
        try:
            if type(value) in _MAPPINGS:
                return self._mapping(value, path)
            items = [self.pack(item, f"{path}[{index}]") for index, item in enumerate(value)]
        finally:
            self._open.discard(id(value))
        if type(value) is list:
            return items
        node: dict[str, Any] = {TYPE: _SEQUENCES[type(value)], "items": items}
        if type(value) is collections.deque:
            node["maxlen"] = value.maxlen
        return node

    def _mapping(self, value: Any, path: str) -> Any:
        packed = [(key, self.pack(item, f"{path}[{key!r}]")) for key, item in value.items()]
        if type(value) is dict and TYPE not in value and all(type(key) is str for key in value):
            return dict(packed)
        node: dict[str, Any] = {
            TYPE: _MAPPINGS[type(value)],
            "items": [[self.pack(key, f"{path}.keys()[{key!r}]"), item] for key, item in packed],
        }
        if type(value) is collections.defaultdict and value.default_factory is not None:
            name = getattr(value.default_factory, "__name__", "")
            if _FACTORIES.get(name) is not value.default_factory:
                raise _unsupported(value.default_factory, f"{path}.default_factory")
            node["factory"] = name
        return node

    def _bytes(self, kind: str, value: bytes, path: str) -> Any:
        if len(value) <= MAX_INLINE_BYTES:
            return {TYPE: kind, "base64": base64.b64encode(value).decode()}
        return {TYPE: kind, "key": self._store_bytes(value, path)}

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        if type(value) not in _TENSORS:
            raise _unsupported(value, path)
        if value.layout is not torch.strided or value.is_quantized:
            raise CheckpointError(
                f"{path} is a {'quantized' if value.is_quantized else value.layout} tensor; "
                "a checkpoint stores only dense tensors that are not quantized: convert it before saving"
            )
        if value.device.type == "meta":
            raise CheckpointError(f"{path} is on the meta device and has no data to save")
        stored = value.detach() if value.requires_grad else value  # detach() of a DTensor takes 30 µs
        return {TYPE: "tensor", "key": self._store(stored, path), "device": value.device.type}

    def _numpy(self, value: Any, path: str) -> Any:
        import numpy as np

        if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufcmMSU":
            if isinstance(value, np.generic):
                data = base64.b64encode(value.tobytes()).decode()
                return {TYPE: "numpy_scalar", "dtype": value.dtype.str, "base64": data}
            if type(value) is np.ndarray:
                return {
                    TYPE: "array",
                    "dtype": value.dtype.str,
                    "shape": list(value.shape),
                    "key": self._store_bytes(value.tobytes(), path),
                }
        raise _unsupported(value, path)

    def _store_bytes(self, data: bytes, path: str) -> str:
        return self._store(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _EMPTY, path)

    def _store(self, tensor: torch.Tensor, path: str) -> str:
        """Add a tensor under a unique key. Two paths may be equal if names contain dots or brackets."""
        key, count = path, 1
        while key in self.tensors:
            count += 1
            key = f"{path}~{count}"
        self.tensors[key] = tensor
        return key


_EMPTY = torch.empty(0, dtype=torch.uint8)


def _unsupported(value: Any, path: str) -> CheckpointError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return CheckpointError(
        f"{path} is a {name}, which cannot be saved (allowed: None, bool, int, float, complex, str, bytes, bytearray, "
        "list, tuple, set, frozenset, dict, defaultdict, OrderedDict, Counter, deque, torch.Size, dtype, device, "
        "tensors, simple numpy types). Return one of these from state_dict(), or recreate the value after loading"
    )


def _raw(node: dict[str, Any], tensor: Callable[[str], torch.Tensor]) -> bytes:
    if "base64" in node:
        return base64.b64decode(node["base64"])
    return tensor(node["key"]).cpu().numpy().tobytes()


def _items(node: dict[str, Any], tensor: Callable[[str], torch.Tensor]) -> list[Any]:
    return [unpack(item, tensor) for item in node["items"]]


def _default_dict(node: dict[str, Any], tensor: Callable[[str], torch.Tensor]) -> collections.defaultdict[Any, Any]:
    factory = _FACTORIES[node["factory"]] if "factory" in node else None
    return collections.defaultdict(factory, _items(node, tensor))


def _array(node: dict[str, Any], tensor: Callable[[str], torch.Tensor]) -> Any:
    import numpy as np

    data = bytearray(_raw(node, tensor))
    dtype = np.dtype(node["dtype"])
    return np.frombuffer(data, dtype=dtype).reshape(node["shape"]) if data else np.empty(node["shape"], dtype=dtype)


def _numpy_scalar(node: dict[str, Any], tensor: Callable[[str], torch.Tensor]) -> Any:
    import numpy as np

    dtype = np.dtype(node["dtype"])
    raw = _raw(node, tensor)
    return np.frombuffer(raw, dtype=dtype)[0] if raw else dtype.type()


_UNPACK: dict[str, Callable[[dict[str, Any], Callable[[str], torch.Tensor]], Any]] = {
    "int": lambda node, _: int(node["hex"], 16),
    "float": lambda node, _: struct.unpack(">d", bytes.fromhex(node["hex"]))[0],
    "complex": lambda node, _: complex(*struct.unpack(">dd", bytes.fromhex(node["hex"]))),
    "bytes": _raw,
    "bytearray": lambda node, tensor: bytearray(_raw(node, tensor)),
    "dtype": lambda node, _: dtype_of(node["name"]),
    "device": lambda node, _: torch.device(node["name"]),
    "tensor": lambda node, tensor: tensor(node["key"]),
    "array": _array,
    "numpy_scalar": _numpy_scalar,
    "tuple": lambda node, tensor: tuple(_items(node, tensor)),
    "set": lambda node, tensor: set(_items(node, tensor)),
    "frozenset": lambda node, tensor: frozenset(_items(node, tensor)),
    "size": lambda node, tensor: torch.Size(_items(node, tensor)),
    "deque": lambda node, tensor: collections.deque(_items(node, tensor), maxlen=node["maxlen"]),
    "dict": lambda node, tensor: dict(_items(node, tensor)),
    "ordered_dict": lambda node, tensor: collections.OrderedDict(_items(node, tensor)),
    "counter": lambda node, tensor: collections.Counter(dict(_items(node, tensor))),
    "default_dict": _default_dict,
}


def _unpack_typed(node: dict[str, Any], tensor: Callable[[str], torch.Tensor]) -> Any:
    try:
        build = _UNPACK[node[TYPE]]
    except KeyError:
        raise CheckpointError(
            f"this checkpoint contains a value of type {node[TYPE]!r}, which this version of hpcaccel does not "
            "support. Upgrade hpcaccel"
        ) from None
    return build(node, tensor)
