"""A spec file together with the files that it extends: ``extends: base.yaml``, in chains too.

Each file's values are expanded and its paths resolved against itself before it is laid over its base.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpcaccel.errors import SpecError
from hpcaccel.spec.expand import expand, expanded_for
from hpcaccel.spec.fields import checked_text
from hpcaccel.spec.files import read_document
from hpcaccel.spec.layers import Layer, merge
from hpcaccel.spec.pipes import base_of, is_pipe
from hpcaccel.spec.problems import report
from hpcaccel.spec.yaml12 import Place, Problem

__all__ = ["read_layers"]


def read_layers(path: Path, shown: str, problems: list[Problem], chain: tuple[Path, ...] = ()) -> Layer:
    """The settings of a file over those of its base; what is wrong in them is added to ``problems``.

    Args:
        shown: how messages name the file.
        chain: the files that led here.

    Raises:
        SpecError: this file, or one that it extends, cannot be read at all.
    """
    document = read_document(path, shown)
    problems += document.problems
    layer = Layer(document.value, document.places)
    base = layer.values.pop("extends", None)
    place = layer.places.get(("extends",), Place(shown))
    _refuse_function(layer, problems)
    layer, found = expand(layer, base_of(path))
    problems += found
    if base is None:
        return layer
    if not isinstance(base, str) or not base:
        problems.append(Problem(place, "extends must be the path of one file, such as base.yaml"))
        return layer
    try:
        checked_text(base)
    except ValueError as error:
        problems.append(Problem(place, f"extends {base!r} {error}"))
        return layer
    return merge(_base(base, place, path, problems, (*chain, _resolved(path))), layer)


def _base(reference: str, place: Place, path: Path, problems: list[Problem], chain: tuple[Path, ...]) -> Layer:
    with expanded_for(None):  # whomever the spec is for, its files are here
        named, found = expand(Layer({"extends": reference}, {("extends",): place}), base_of(path))
    problems += found
    target = _beside(path, os.path.expanduser(named.values["extends"]))
    words = f"extends {reference!r}"
    if _resolved(target) in chain:
        files = " → ".join(file.name for file in (*chain, target))
        raise SpecError([*report(problems), f"{place}: {words} comes back to where it started: {files}"])
    try:
        return read_layers(target, str(target), problems, chain)
    except SpecError as error:
        raise SpecError([*report(problems), *(f"{place}: {words}: {line}" for line in error.problems)]) from None


def _beside(path: Path, reference: str) -> Path:
    return (base_of(path) if is_pipe(path) else path.parent) / reference


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path  # reading it says what is wrong


def _refuse_function(layer: Layer, problems: list[Problem]) -> None:
    entrypoint = layer.values.get("entrypoint")
    if isinstance(entrypoint, dict) and entrypoint.pop("function", None) is not None:
        place = layer.places[("entrypoint", "function")]
        message = "entrypoint.function is set by hpcaccel.submit() in Python: use script, module or command"
        problems.append(Problem(place, message))
