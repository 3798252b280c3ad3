"""From a YAML file, its bases, a cluster's defaults and the command line to one validated ``JobSpec``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hpcaccel.errors import SpecError
from hpcaccel.spec.expand import expand
from hpcaccel.spec.files import read_document
from hpcaccel.spec.job import JobSpec
from hpcaccel.spec.layers import Layer, merge, put
from hpcaccel.spec.overrides import parse_override
from hpcaccel.spec.problems import conflicts, describe
from hpcaccel.spec.yaml12 import KeyPath, Place

if TYPE_CHECKING:
    from hpcaccel.spec.cluster import ClusterProfile

__all__ = ["load_spec", "spec_from_values"]


def load_spec(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    profile: ClusterProfile | None = None,
    check_files: bool = True,
) -> JobSpec:
    """Load a spec file.

    Args:
        path: the YAML file. Paths in it and in overrides are relative to its directory; paths in a base to the base's.
        overrides: ``key.sub=value``, over everything else.
        profile: a cluster whose defaults lie under everything else.
        check_files: the script, or a program named by a path, must exist.

    Raises:
        SpecError: with a line for each thing that is wrong.
    """
    source = Path(path)
    problems: list[str] = []
    layer = _with_bases(source, str(path), (), problems)
    spec = _build(layer, source.parent, str(path), overrides=overrides, profile=profile, problems=problems)
    if check_files:
        _check_files(spec, layer, str(path))
    spec._source = source.absolute()
    return spec


def spec_from_values(
    values: Mapping[str, Any],
    *,
    base: str | os.PathLike[str] = ".",
    overrides: Sequence[str] = (),
    profile: ClusterProfile | None = None,
) -> JobSpec:
    """A spec from Python values, with the defaults, overrides and messages that a file has.

    Args:
        base: the directory that relative paths start from.

    Raises:
        SpecError: with a line for each thing that is wrong.
    """
    problems: list[str] = []
    layer = _expanded(Layer(dict(values)), Path(base), problems)
    return _build(layer, Path(base), "spec", overrides=overrides, profile=profile, problems=problems)


def _build(
    layer: Layer,
    base: Path,
    source: str,
    *,
    overrides: Sequence[str],
    profile: ClusterProfile | None,
    problems: list[str],
) -> JobSpec:
    if profile is not None:
        layer = merge(profile.defaults(), layer)
    layer = _overridden(layer, overrides, base, problems)
    try:
        spec = JobSpec.model_validate(layer.values)
    except ValidationError as error:
        problems += describe(error, JobSpec, layer, source)
        problems += conflicts(JobSpec, layer, source)
    if problems:
        raise SpecError(list(dict.fromkeys(problems)))
    return spec


def _with_bases(path: Path, shown: str, chain: tuple[Path, ...], problems: list[str]) -> Layer:
    """The file's settings over those of the file that it extends, and so on."""
    document = read_document(path, shown)
    problems += document.problems
    layer = Layer(dict(document.value or {}), document.places)
    if "extends" not in layer.values:
        return _from_file(layer, path, problems)
    base = layer.values.pop("extends")
    place = layer.places.pop(("extends",))
    layer = _from_file(layer, path, problems)
    if not isinstance(base, str) or not base:
        problems.append(f"{place}: extends must be the path of one file, such as base.yaml")
        return layer
    return merge(_base(base, place, path, (*chain, path.resolve()), problems), layer)


def _from_file(layer: Layer, path: Path, problems: list[str]) -> Layer:
    entrypoint = layer.values.get("entrypoint")
    if isinstance(entrypoint, dict) and entrypoint.pop("function", None) is not None:
        place = layer.place(("entrypoint", "function"))
        problems.append(
            f"{place}: entrypoint.function is set by hpcaccel.submit() in Python only: use script, module or command"
        )
    return _expanded(layer, path.parent, problems)


def _base(reference: str, place: Place, path: Path, chain: tuple[Path, ...], problems: list[str]) -> Layer:
    named, found = expand(Layer({"extends": reference}, {("extends",): place}), path.parent)
    problems += found
    target = path.parent / os.path.expanduser(named.values["extends"])
    if target.resolve() in chain:
        files = " → ".join(file.name for file in (*chain, target))
        problems.append(f"{place}: extends {reference!r} comes back to where it started: {files}")
        return Layer({})
    try:
        return _with_bases(target, str(target), chain, problems)
    except SpecError as error:
        problems += [f"{place}: extends {reference!r}: {problem}" for problem in error.problems]
        return Layer({})


def _expanded(layer: Layer, base: Path, problems: list[str]) -> Layer:
    expanded, found = expand(layer, base.absolute())
    problems += found
    return expanded


def _overridden(layer: Layer, overrides: Sequence[str], base: Path, problems: list[str]) -> Layer:
    settings: list[tuple[KeyPath, Any]] = []
    places: dict[KeyPath, Place] = {}
    for text in overrides:
        try:
            path, value, where = parse_override(text, layer)
        except SpecError as error:
            problems += error.problems
            continue
        setting = Layer(put(Layer({}), [(path, value)]).values, where)
        settings.append((path, _at(_expanded(setting, base, problems).values, path)))
        places.update(where)
    result = put(layer, settings)
    result.places.update(places)
    return result


def _at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values[key]
    return values


def _check_files(spec: JobSpec, layer: Layer, source: str) -> None:
    """A program that is named by its path must be there: better to hear it now than after the queue."""
    entrypoint = spec.entrypoint
    if entrypoint.script is not None:
        key, program = "script", entrypoint.script
    elif entrypoint.command is not None and os.path.isabs(entrypoint.command[0]):
        key, program = "command", entrypoint.command[0]
    else:
        return
    if os.path.isfile(program):
        return
    raise SpecError(f"{layer.place(('entrypoint', key)) or source}: entrypoint.{key} {program!r} is not a file")
