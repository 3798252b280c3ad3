"""Error messages for spec files, made from pydantic's errors: location, key, value, what is allowed, closest match."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from hpcaccel.core.formatting import did_you_mean
from hpcaccel.spec.job.fields import Inside, Section
from hpcaccel.spec.loading.layers import Layer
from hpcaccel.spec.loading.overrides import section_by_name, section_of, sections
from hpcaccel.spec.yaml12 import KeyPath, PlainScalar, Problem, SourceLocation

__all__ = ["conflicts", "describe", "report"]

_SHOWN = 80
_EXPECTED = re.compile(r"'([^']*)'")
_MUST_BE = {
    "model_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "list_type": "must be a list",
    "string_type": "must be a string",
}


def describe(error: ValidationError, model: type[BaseModel], layer: Layer, source: str) -> list[Problem]:
    """One problem per pydantic error. ``source`` is reported as the location of values that have none in ``layer``."""
    return [_line(details, model, layer, source) for details in error.errors(include_url=False)]


def conflicts(model: type[Section], layer: Layer, source: str, path: KeyPath = ()) -> list[Problem]:
    """Conflicts between the settings in ``layer``. The settings need not be valid, so that conflicts are reported
    together with all other errors."""
    value: Any = layer.values
    for key in path:
        value = value.get(key)
    if not isinstance(value, dict):
        return []
    found = []
    for key, message in model.conflicts(value):
        where = (*path, *_keys(key))
        found.append(_located(layer, source, where, f"{_dotted(where)} {message}"))
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is not None and issubclass(section, Section):
            found += conflicts(section, layer, source, (*path, name))
    return found


def report(problems: Sequence[Problem]) -> list[str]:
    """The problems as message lines without duplicates: file by file, sorted by line number."""
    sources = list(dict.fromkeys(problem.place.source for problem in problems))
    ordered = sorted(problems, key=lambda problem: (sources.index(problem.place.source), problem.place.line or 0))
    return list(dict.fromkeys(map(str, ordered)))


def _line(details: Any, model: type[BaseModel], layer: Layer, source: str) -> Problem:
    kind: str = details["type"]
    path = _path(details["loc"], layer, missing=kind == "missing")
    if kind == "conflict":
        path = (*path, *_keys(details["ctx"]["key"]))
        return _located(layer, source, path, f"{_dotted(path)} {details['ctx']['message']}")
    if kind == "extra_forbidden":
        return _located(layer, source, path, _unknown(path, model, details["input"]))
    if kind == "missing":
        path = tuple(details["loc"])  # not `path`: `pruner: asha` is short for a mapping that is not in the file
        field = _model_at(path[:-1], model).model_fields[str(path[-1])]
        return _located(layer, source, path, f"{_dotted(path)} is missing. {field.description}")
    value = details["input"]
    subject = f"{_dotted(path)} {_shown(value)}".rstrip()
    error = details.get("ctx", {}).get("error")
    inside = error.path if isinstance(error, Inside) else ()
    return _located(layer, source, (*path, *inside), f"{subject} {_predicate(kind, details, value)}")


def _predicate(kind: str, details: Any, value: Any) -> str:
    if kind == "value_error":
        return str(details["ctx"]["error"])
    if kind in ("literal_error", "enum"):
        allowed = _EXPECTED.findall(details["ctx"]["expected"])
        return f"is not valid (allowed: {', '.join(allowed)})" + did_you_mean(str(value), allowed)
    if kind in _MUST_BE:
        return _MUST_BE[kind]
    message: str = details["msg"]
    return f"is not valid: {message[:1].lower()}{message[1:]}"


def _unknown(path: KeyPath, model: type[BaseModel], value: Any) -> str:
    section = _model_at(path[:-1], model)
    key = str(path[-1])
    if advice := getattr(section, "moved", {}).get(key):
        return f"{_dotted(path)} {advice}"
    known = [field.alias or name for name, field in section.model_fields.items() if name != "function"]
    text = f"{_dotted(path)} is not a known key (allowed: {', '.join(known)})"
    closest = did_you_mean(key, known)
    elsewhere = [f"{name}.{key}" for name, keys in sections().items() if name and key in keys]
    if elsewhere and key not in closest:
        return f"{text}. Did you mean {' or '.join(repr(item) for item in elsewhere)}?"
    return text + closest


def _model_at(path: KeyPath, model: type[BaseModel]) -> type[BaseModel]:
    items: type[BaseModel] | None = None  # the items of a mapping with free keys
    for key in path:
        fields = {field.alias or name: field for name, field in model.model_fields.items()}
        annotation = fields[str(key)].annotation if items is None and str(key) in fields else None
        found = items or section_of(annotation)
        items = section_by_name(annotation)
        if found is None and items is None:
            return model
        model = found or model
    return model


def _path(loc: tuple[str | int, ...], layer: Layer, *, missing: bool) -> KeyPath:
    """pydantic's location without the parts that are not keys of the file (``[key]``, union members)."""
    path: list[str | int] = []
    value: Any = layer.values
    for index, key in enumerate(loc):
        if isinstance(value, Mapping) and key in value:
            value = value[str(key)]
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        elif not (missing and index == len(loc) - 1):
            continue
        path.append(key)
    return tuple(path)


def _keys(dotted: str) -> KeyPath:
    """The path of a conflict's key. Only the first dot separates two levels; later dots are part of the second key."""
    if not dotted:
        return ()
    head, dot, rest = dotted.partition(".")
    if not dot:
        return (head,)
    return (head, int(rest) if rest.isdigit() else rest)


def _located(layer: Layer, source: str, path: KeyPath, message: str) -> Problem:
    return Problem(layer.place(path) or SourceLocation(source), message)


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path) or "the file"


def _shown(value: Any) -> str:
    """The value for a message: shortened if it is long; empty for a list or a mapping."""
    if isinstance(value, PlainScalar):
        return value.text
    if value is None:
        return "null"
    if isinstance(value, Mapping | list | tuple):
        return ""
    text = repr(value) if isinstance(value, str | int | float) else type(value).__name__
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}...{text[0]}"
