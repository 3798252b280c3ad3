"""Settings from several places, one over the other: profile, base files, the file, overrides.

Mappings are merged key by key; anything else, lists too, replaces what lies below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcaccel.spec.entrypoint import Entrypoint
from hpcaccel.spec.environment_fields import Environment
from hpcaccel.spec.resources import asks_for_gpus
from hpcaccel.spec.slurm import Slurm
from hpcaccel.spec.yaml12 import KeyPath, Place

__all__ = ["Layer", "merge", "put"]

_RIVALS: dict[str, tuple[tuple[str, ...], ...]] = {
    "entrypoint": Entrypoint.rivals,
    "slurm": (*Slurm.rivals, ("gpus_per_node", "gpus_per_task", "gres")),
    "environment": Environment.rivals,
}


@dataclass
class Layer:
    """Values, and where each of them was written."""

    values: dict[str, Any]
    places: dict[KeyPath, Place] = field(default_factory=dict)

    def place(self, path: KeyPath) -> Place | None:
        """The place of a value, or of the nearest thing around it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return None


def merge(lower: Layer, upper: Layer) -> Layer:
    """``upper`` over ``lower``. Neither is changed."""
    settings = [(path, value) for path, value in _leaves(upper.values, ()) if value != {} or not _mapping(lower, path)]
    result = put(lower, settings)
    result.places.update(upper.places)
    return result


def put(lower: Layer, settings: Sequence[tuple[KeyPath, Any]]) -> Layer:
    """``lower`` with some values replaced; it is not changed itself.

    A setting also removes those of ``lower`` that it rules out (``mem_per_cpu`` over ``mem``). Settings that rule out
    each other both stay, for validation to refuse.
    """
    result = Layer(_copied(lower.values))
    gone: set[KeyPath] = set()
    for path, value in settings:
        section = result.values.get(str(path[0]))
        for rival in _rivals(path, value):
            if isinstance(section, dict) and _stands(rival, section):
                del section[rival]
                gone.add((path[0], rival))
    for path, value in settings:
        target = result.values
        for key in path[:-1]:
            if not isinstance(target.get(str(key)), dict):
                target[str(key)] = {}
            target = target[str(key)]
        target[str(path[-1])] = _copied(value)
        gone.add(path)
    result.places = {key: place for key, place in lower.places.items() if not _is_below(key, gone)}
    return result


def _stands(rival: str, section: Mapping[str, Any]) -> bool:
    return section.get(rival) is not None and (rival != "gres" or asks_for_gpus("gres", section["gres"]))


def _rivals(path: KeyPath, value: Any) -> list[str]:
    if len(path) < 2 or value is None:
        return []
    key = str(path[1])
    if key == "gres" and not asks_for_gpus("gres", value):
        return []
    groups = _RIVALS.get(str(path[0]), ())
    return [rival for group in groups if key in group for rival in group if rival != key]


def _leaves(values: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _mapping(layer: Layer, path: KeyPath) -> bool:
    """Whether there is one already: an empty one over it changes nothing."""
    value: Any = layer.values
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return isinstance(value, Mapping)


def _is_below(key: KeyPath, places: set[KeyPath]) -> bool:
    return any(key[:length] in places for length in range(len(key) + 1))


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
