"""Traversal of nested lists, tuples, namedtuples and mappings of tensors. Containers keep their types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hpcaccel.errors import RuntimeMisuse

__all__ = [
    "NotATensor",
    "form_of",
    "honor_type",
    "is_namedtuple",
    "is_torch_tensor",
    "leaves",
    "recursively_apply",
    "refilled",
    "same_mapping",
    "tensor_form",
    "tensor_kind",
]


class NotATensor(RuntimeMisuse, TypeError):
    """A value that is not a tensor where a tensor is required."""


def is_torch_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_asdict") and hasattr(value, "_fields")


def honor_type(example: Any, items: Iterable[Any]) -> Any:
    """A list, tuple or namedtuple of ``items``, of the same type as ``example``."""
    return type(example)(*items) if is_namedtuple(example) else type(example)(items)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """``data`` with ``func(leaf, *args, **kwargs)`` in place of each leaf that ``test_type`` accepts; other leaves are
    kept.

    Raises:
        NotATensor: ``test_type`` rejects a leaf, and ``error_on_other_type`` is set.
    """

    def apply(item: Any) -> Any:
        # Containers are traversed even if test_type accepts them.
        if isinstance(item, list | tuple):
            return honor_type(item, [apply(part) for part in item])
        if isinstance(item, Mapping):
            return same_mapping(item, {key: apply(part) for key, part in item.items()})
        if test_type(item):
            return func(item, *args, **kwargs)
        if error_on_other_type:
            raise NotATensor(_not_a_tensor(item, getattr(func, "__name__", str(func))))
        return item

    return apply(data)


def leaves(value: Any, what: str) -> list[torch.Tensor]:
    """All tensors of a nested value, in order.

    Raises:
        NotATensor: a leaf is not a tensor.
    """
    found: list[torch.Tensor] = []
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, list | tuple | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            found += leaves(item, what)
    else:
        raise NotATensor(_not_a_tensor(value, what))
    return found


def refilled(value: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """The containers of ``value`` with ``tensors``, in order, in place of the original tensors."""
    rest = iter(tensors)
    return recursively_apply(lambda _: next(rest), value)


def same_mapping(example: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of ``items``, of the same type as ``example``."""
    if type(example) is dict:
        return items
    factory = getattr(example, "default_factory", None)  # a defaultdict's first argument is not its items
    return type(example)(items) if factory is None else type(example)(factory, items)  # type: ignore[call-arg]


def tensor_form(tensor: torch.Tensor) -> str:
    """Type and shape as text: ``float32[4, 3]``, or ``cuda float32[4, 3]`` for a tensor that is not on the CPU."""
    return f"{tensor_kind(tensor)}{list(tensor.shape)}"


def tensor_kind(tensor: torch.Tensor) -> str:
    """Type as text: ``float32``, or ``cuda float32`` for a tensor that is not on the CPU."""
    device = "" if tensor.device.type == "cpu" else f"{tensor.device.type} "
    return f"{device}{str(tensor.dtype)[6:]}"


def form_of(value: Any, leaf: Callable[[torch.Tensor], str] = tensor_form) -> str:
    """``value`` as text: its containers, the type and shape of each tensor, and the type of any other value."""
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(form_of(item, leaf) for item in value)})"
    if isinstance(value, Mapping):
        items = ", ".join(f"{key!r}: {form_of(item, leaf)}" for key, item in value.items())
        return f"{type(value).__name__}({items})"
    return type(value).__name__


def _not_a_tensor(value: Any, what: str) -> str:
    hint = {"gather": ". Use gather_object for objects, or gather_for_metrics for tensors and objects"}.get(what, "")
    return (
        f"{what} takes tensors, and lists, tuples and dicts of them at any depth, but got {_short(value)} "
        f"({type(value).__name__}){hint}"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
