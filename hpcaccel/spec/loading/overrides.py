"""Command-line overrides: ``key.sub=value`` replaces one setting of the file.

The leading section, except ``container`` and ``stage``, may be omitted if the key is unique: ``nodes=4`` is
``slurm.nodes``, ``args.lr=1e-3`` is ``entrypoint.args.lr``. The value is a plain scalar, or a list, mapping or quoted
text in YAML syntax.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from hpcaccel.errors import SpecError
from hpcaccel.spec.job.job_spec import JobSpec
from hpcaccel.spec.loading.layers import Layer
from hpcaccel.spec.yaml12 import Document, KeyPath, SourceLocation, parse_value

__all__ = [
    "full_path",
    "grid",
    "grid_size",
    "override_place",
    "parse_override",
    "section_by_name",
    "section_of",
    "sections",
    "setting_path",
]


FREE_MAPPINGS: tuple[KeyPath, ...] = (
    ("entrypoint", "args"),
    ("slurm", "extra"),
    ("environment", "env"),
    ("container", "env"),
    ("sweep", "parameters"),
)
"""Mappings whose keys are free: below such a mapping, the path of a setting may continue with any key."""


WRITTEN_IN_FULL = ("container", "stage")
"""Sections whose names cannot be omitted from a path, because other sections have keys with the same names."""


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model class of a field that is a section or an optional section, else None."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    if get_origin(annotation) in (Union, UnionType) and len(kinds) == 1:
        annotation = kinds[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def section_by_name(annotation: Any) -> type[BaseModel] | None:
    """For a field that maps free names to sections, the model class of these sections; else None."""
    return section_of(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def sections(model: type[JobSpec] = JobSpec) -> dict[str, list[str]]:
    """The sections of a file and the keys of each; "" is the top level."""
    result = {"": list(model.model_fields)}
    for name, field in model.model_fields.items():
        if section := section_of(field.annotation):
            result[name] = [item.alias or key for key, item in section.model_fields.items() if key != "function"]
    return result


def full_path(dotted: str, model: type[JobSpec] = JobSpec) -> KeyPath:
    """The full path of a setting of ``model``; the leading section may be omitted.

    Raises:
        SpecError: no setting or more than one setting has this name. The message names the closest or all matches.
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
        f"{section}.{rest[0]} is not a known key (allowed: "
        f"{', '.join(known[section])}).{_closest(rest[0], known[section])}"
    )


def _moved(key: str, model: type[JobSpec]) -> str | None:
    for section in (model, *(section_of(field.annotation) for field in model.model_fields.values())):
        if advice := getattr(section, "moved", {}).get(key):
            return str(advice)
    return None


def _closest(word: str, known: Sequence[str]) -> str:
    """A hint that names the known key closest to ``word``, with or without the key's section; "" if no key is close."""
    spellings = {item.rpartition(".")[2]: item for item in known if item} | {item: item for item in known if item}
    match = difflib.get_close_matches(word, list(spellings), n=1)
    return f" Did you mean {spellings[match[0]]!r}?" if match else ""


def _joined(parts: tuple[str, ...]) -> KeyPath:
    """Join the parts below a mapping with free keys into one key, which may contain dots."""
    for free in FREE_MAPPINGS:
        if parts[:2] == free and len(parts) > 2:
            return (*free, ".".join(parts[2:]))
    return parts


def override_place(text: str) -> SourceLocation:
    """The source location of an override, for messages."""
    return SourceLocation(f"command line: {text if len(text) <= 80 else text[:77] + '...'}")


def parse_override(text: str, layer: Layer, model: type[JobSpec] = JobSpec) -> tuple[KeyPath, Document]:
    """Parse ``key.sub=value`` into the path of the setting in ``layer`` and its value.

    Raises:
        SpecError: the text contains no ``=``, the key does not exist, or the value is not valid YAML.
    """
    dotted, equals, value = text.partition("=")
    if not equals or not dotted:
        raise SpecError("an override must have the form key=value, such as nodes=4")
    path = setting_path(dotted, layer, model)
    document = parse_value(value, override_place(text))
    if document.problems:
        message = "; ".join(problem.message for problem in document.problems)
        raise SpecError(
            f"{message}. A value that starts with a bracket or a quote is parsed as YAML: quote all of it to pass a "
            f"string"
        )
    return path, document


def setting_path(dotted: str, layer: Layer, model: type[JobSpec] = JobSpec) -> KeyPath:
    """The full path of a setting, whether or not it is set in ``layer``; the leading section may be omitted.

    Raises:
        SpecError: the key does not exist, is ambiguous, or is below a list.
    """
    path = _levels(full_path(dotted, model), layer)
    _check_levels(path, layer)
    return path


def _levels(path: KeyPath, layer: Layer) -> KeyPath:
    """Split a dotted argument where ``layer`` has mappings: ``args.model.depth`` is the key ``depth`` of the mapping
    ``model`` if there is such a mapping, else the single key ``model.depth``."""
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
    """Refuse a path that continues below a list."""
    value: Any = layer.values
    for index, key in enumerate(path[:-1]):
        value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, list):
            dotted = ".".join(str(part) for part in path[: index + 1])
            raise SpecError(f"{dotted} is a list here: set the whole list, {dotted}=[a, b]")


def grid(axes: Sequence[str]) -> list[list[str]]:
    """All combinations of the values of ``key=a,b,c`` axes. Each combination is a list of overrides; the last axis
    varies fastest. A comma inside brackets or quotes does not separate two values.

    Raises:
        SpecError: an axis has no ``=``, an empty value, an unknown key, or the key of another axis.
    """
    return [list(combination) for combination in itertools.product(*_choices(axes))]


def grid_size(axes: Sequence[str]) -> int:
    """The number of combinations, without building them. Raises the same errors as :func:`grid`."""
    return math.prod(len(values) for values in _choices(axes))


def _choices(axes: Sequence[str]) -> list[list[str]]:
    keys: dict[KeyPath, str] = {}
    choices = []
    for axis in axes:
        try:
            key, values = _axis(axis, keys)
        except SpecError as error:
            raise SpecError(f"command line: --grid {axis}: {error}") from None
        choices.append([f"{key}={value}" for value in values])
    return choices


def _axis(axis: str, keys: dict[KeyPath, str]) -> tuple[str, list[str]]:
    key, equals, text = axis.partition("=")
    if not equals or not key:
        raise SpecError("write key=a,b,c, such as args.lr=1e-3,3e-4")
    path = full_path(key)
    if path in keys:
        raise SpecError(f"{keys[path]} is already an axis")
    keys[path] = key
    values = _split(text)
    if "" in values:
        raise SpecError("a value is empty (write '' for an empty string)")
    return key, values


def _split(values: str) -> list[str]:
    parts, start, depth, quote = [], 0, 0, ""
    for index, character in enumerate(values):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(values[start:index])
            start = index + 1
    return [*parts, values[start:]]
