"""What a script wants done right before everything is saved or loaded, as with models that it saves in its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["load_hooks_keep", "register", "save_hooks_keep"]

Hooks = dict[int, Callable[..., Any]]


def register(hooks: Hooks, hook: Callable[..., Any]) -> RemovableHandle:
    """Add a hook; ``remove()`` of what comes back takes it out again."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def save_hooks_keep(hooks: Mapping[int, Callable[..., Any]], models: list[nn.Module], directory: str) -> frozenset[int]:
    """Call each ``hook(models, weights, directory)``, ``weights`` being the models' state dicts.

    Returns:
        Positions of the models that the hooks have taken out of either list: they have saved them themselves.
    """
    offered = list(models)
    weights = [model.state_dict() for model in models]
    left = list(weights)
    for hook in hooks.values():
        hook(offered, left, directory)
    kept_weights, kept_models = {id(item) for item in left}, {id(item) for item in offered}
    return frozenset(
        position
        for position, (model, own) in enumerate(zip(models, weights, strict=True))
        if id(own) not in kept_weights or id(model) not in kept_models
    )


def load_hooks_keep(hooks: Mapping[int, Callable[..., Any]], models: list[nn.Module], directory: str) -> frozenset[int]:
    """Call each ``hook(models, directory)``.

    Returns:
        Positions of the models that the hooks have taken out of the list: they have loaded them themselves.
    """
    offered = list(models)
    for hook in hooks.values():
        hook(offered, directory)
    kept = {id(item) for item in offered}
    return frozenset(position for position, model in enumerate(models) if id(model) not in kept)
