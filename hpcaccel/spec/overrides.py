"""``key.sub=value`` on the command line: one setting laid over the file's.

The path may leave out its leading section where that is unique: ``nodes=4`` is ``slurm.nodes``, ``args.lr=1e-3`` is
``entrypoint.args.lr``. The value is a plain scalar as it stands, or a list, mapping or quoted text as in YAML.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from hpcaccel.errors import SpecError
from hpcaccel.spec.job import JobSpec
from hpcaccel.spec.layers import Layer
from hpcaccel.spec.yaml12 import Document, KeyPath, Place, parse_value

__all__ = ["full_path", "override_place", "parse_override", "section_by_name", "section_of", "sections", "setting_path"]

FREE_MAPPINGS: tuple[KeyPath, ...] = (
    ("entrypoint", "args"),
    ("slurm", "extra"),
    ("environment", "env"),
    ("container", "env"),
    ("sweep", "parameters"),
)
"""Mappings whose keys are the user's own: a path goes on below them."""


WRITTEN_IN_FULL = ("container", "stage")
"""Sections that a path cannot leave out: their keys are words that others have, too."""


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model class of a field that is a section of its own, or may be left out as a whole."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) in (Union, UnionType) and len(kinds) == 1:
        annotation = kinds[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def section_by_name(annotation: Any) -> type[BaseModel] | None:
    """The model class of a field that maps names, the user's own, to sections."""
    return section_of(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def sections(model: type[JobSpec] = JobSpec) -> dict[str, list[str]]:
    """Every section that a file may have and its keys; "" stands for the top."""
    result = {"": list(model.model_fields)}
    for name, field in model.model_fields.items():
        if section := section_of(field.annotation):
            result[name] = [item.alias or key for key, item in section.model_fields.items() if key != "function"]
    return result


def full_path(dotted: str, model: type[JobSpec] = JobSpec) -> KeyPath:
    """The whole path of a setting whose leading section may be missing; ``model`` says which settings there are.

    Raises:
        SpecError: nothing answers to it (with the closest match), or more than one thing does.
    """
    parts = tuple(dotted.split("."))
    known = sections(model)
    if parts[0] in known:
        _check_key(parts, known, model)
        return _joined(parts)
    if parts[0] in known[""]:
        return parts
    places = [name for name, keys in known.items() if name and name not in WRITTEN_IN_FULL and parts[0] in keys]
    if len(places) > 1:
        candidates = " or ".join(f"{name}.{dotted}" for name in places)
        raise SpecError(f"{dotted} is ambiguous: write {candidates}")
    if places:
        return _joined((places[0], *parts))
    if advice := _moved(parts[0], model):
        raise SpecError(f"{dotted} {advice}")
    every = [*known, *(f"{name}.{key}" for name, keys in known.items() if name for key in keys)]
    raise SpecError(f"{dotted} is not a known key.{_closest(dotted, every)}")


def _check_key(parts: KeyPath, known: Mapping[str, list[str]], model: type[JobSpec]) -> None:
    section, *rest = (str(part) for part in parts)
    if not rest:
        raise SpecError(f"{section} is a section: set one of its keys ({', '.join(known[section])})")
    if rest[0] in known[section]:
        return
    if advice := getattr(section_of(model.model_fields[section].annotation), "moved", {}).get(rest[0]):
        raise SpecError(f"{section}.{rest[0]} {advice}")
    raise SpecError(
        f"{section}.{rest[0]} is not a known key (has: {', '.join(known[section])}).{_closest(rest[0], known[section])}"
    )


def _moved(key: str, model: type[JobSpec]) -> str | None:
    for section in (model, *(section_of(field.annotation) for field in model.model_fields.values())):
        if advice := getattr(section, "moved", {}).get(key):
            return str(advice)
    return None


def _closest(word: str, known: Sequence[str]) -> str:
    """The known key most like ``word``, with or without its section."""
    spellings = {item.rpartition(".")[2]: item for item in known if item} | {item: item for item in known if item}
    match = difflib.get_close_matches(word, list(spellings), n=1)
    return f" Did you mean {spellings[match[0]]!r}?" if match else ""


def _joined(parts: tuple[str, ...]) -> KeyPath:
    """Below a mapping with free keys, what follows is one key; a dot may be part of it."""
    for free in FREE_MAPPINGS:
        if parts[:2] == free and len(parts) > 2:
            return (*free, ".".join(parts[2:]))
    return parts


def override_place(text: str) -> Place:
    """How messages name an override."""
    return Place(f"command line: {text if len(text) <= 80 else text[:77] + '...'}")


def parse_override(text: str, layer: Layer, model: type[JobSpec] = JobSpec) -> tuple[KeyPath, Document]:
    """The path and the value of ``key.sub=value``, to be put over ``layer``.

    Raises:
        SpecError: no ``=``, no such key, or a value that is not YAML.
    """
    dotted, equals, value = text.partition("=")
    if not equals or not dotted:
        raise SpecError("an override is written key=value, such as nodes=4")
    path = setting_path(dotted, layer, model)
    document = parse_value(value, override_place(text))
    if document.problems:
        words = "; ".join(problem.message for problem in document.problems)
        raise SpecError(f"{words}. Text that begins with a bracket or a quote is read as YAML: put all of it in quotes")
    return path, document


def setting_path(dotted: str, layer: Layer, model: type[JobSpec] = JobSpec) -> KeyPath:
    """Where a setting that is named in short stands in ``layer``, or would stand.

    Raises:
        SpecError: no such key, or one below a list.
    """
    path = _levels(full_path(dotted, model), layer)
    _check_levels(path, layer)
    return path


def _levels(path: KeyPath, layer: Layer) -> KeyPath:
    """``args.model.depth``: one key with a dot, or a level below where the file has one."""
    if path[:2] != ("entrypoint", "args") or len(path) < 3:
        return path
    section = layer.values.get("entrypoint")
    args = section.get("args") if isinstance(section, Mapping) else None
    key = str(path[2])
    levels: list[str] = []
    while isinstance(args, Mapping) and key not in args:
        first = next((name for name in args if key.startswith(f"{name}.") and isinstance(args[name], Mapping)), None)
        if first is None:
            break
        levels.append(first)
        key, args = key[len(first) + 1 :], args[first]
    return (*path[:2], *levels, key)


def _check_levels(path: KeyPath, layer: Layer) -> None:
    """A list has no keys below it."""
    value: Any = layer.values
    for index, key in enumerate(path[:-1]):
        value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, list):
            dotted = ".".join(str(part) for part in path[: index + 1])
            raise SpecError(f"{dotted} is a list here: give all of it, {dotted}=[a, b]")
