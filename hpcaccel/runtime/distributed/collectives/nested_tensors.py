"""Tensors in nested lists, tuples, namedtuples and mappings: finding them, and putting others in their places.

Containers keep their types. These are the functions that scripts know from ``accelerate.utils``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hpcaccel.errors import RuntimeMisuse

__all__ = [
    "NotATensor",
    "honor_type",
    "is_namedtuple",
    "is_torch_tensor",
    "leaves",
    "recursively_apply",
    "refilled",
    "same_mapping",
]


class NotATensor(RuntimeMisuse, TypeError):
    """Something else where a tensor is needed."""


def is_torch_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_asdict") and hasattr(value, "_fields")


def honor_type(example: Any, items: Iterable[Any]) -> Any:
    """A list, tuple or namedtuple of these items, as the example is one."""
    return type(example)(*items) if is_namedtuple(example) else type(example)(items)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """``func(leaf, *args, **kwargs)`` in place of each leaf that ``test_type`` accepts; other leaves stay.

    Raises:
        NotATensor: ``error_on_other_type``, and there is another leaf.
    """

    def apply(item: Any) -> Any:
        # Namedtuples and their like are containers even where test_type would take them.
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
    """All tensors, in order.

    Raises:
        NotATensor: a leaf is none.
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
    """The same containers with these tensors, in order, in place of their own."""
    rest = iter(tensors)
    return recursively_apply(lambda _: next(rest), value)


def same_mapping(example: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the example's type with these items."""
    if type(example) is dict:
        return items
    factory = getattr(example, "default_factory", None)  # a defaultdict's first argument is not its items
    return type(example)(items) if factory is None else type(example)(factory, items)  # type: ignore[call-arg]


def _not_a_tensor(value: Any, what: str) -> str:
    hint = {"gather": ". gather_object collects any objects, gather_for_metrics tensors and objects"}.get(what, "")
    return (
        f"{what} takes tensors, in lists, tuples and dictionaries of any depth, and got {_short(value)} "
        f"({type(value).__name__}){hint}"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
