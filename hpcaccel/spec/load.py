"""From a YAML file, its bases, a cluster's defaults and the command line to one validated ``JobSpec``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from hpcaccel.errors import SpecError
from hpcaccel.spec.entrypoint import Entrypoint
from hpcaccel.spec.expand import elsewhere, expand
from hpcaccel.spec.extends import read_layers
from hpcaccel.spec.job import JobSpec
from hpcaccel.spec.layers import Layer, merge, put
from hpcaccel.spec.overrides import override_place, parse_override
from hpcaccel.spec.pipes import base_of
from hpcaccel.spec.problems import conflicts, describe, report
from hpcaccel.spec.yaml12 import KeyPath, Place, Problem

if TYPE_CHECKING:
    from hpcaccel.spec.cluster_profile import ClusterProfile

__all__ = ["check_program", "laid_over", "load_spec", "load_variants", "spec_from_values", "validated"]

J = TypeVar("J", bound=JobSpec)


def load_spec(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    profile: ClusterProfile | None = None,
    check_files: bool = True,
    function: str | None = None,
) -> JobSpec:
    """Load a spec file.

    Args:
        path: the YAML file. Paths in it and in overrides are relative to its directory; paths in a base to the base's.
        overrides: ``key.sub=value``, over everything else.
        profile: a cluster whose defaults lie under everything else.
        check_files: the script, or a program named by a path, must exist.
        function: the name of a Python function that stands in for the file's own entrypoint, if it has one.

    Raises:
        SpecError: with a line for each thing that is wrong.
    """
    options = {"profile": profile, "check_files": check_files, "function": function}
    return next(load_variants(path, [overrides], **options))  # type: ignore[arg-type]


def load_variants(
    path: str | os.PathLike[str],
    variants: Iterable[Sequence[str]],
    *,
    profile: ClusterProfile | None = None,
    check_files: bool = True,
    function: str | None = None,
) -> Iterator[JobSpec]:
    """The specs of one file under different overrides, one after another; the file is read once.

    Raises:
        SpecError: as ``load_spec``.
    """
    source = Path(path)
    found: list[Problem] = []
    layer = read_layers(source, str(path), found)
    if function is not None:
        layer = Layer({**layer.values, "entrypoint": {"function": function}}, layer.places)
    if profile is not None:
        layer = merge(profile.defaults(), layer)
    base = base_of(source)
    for overrides in variants:
        problems = list(found)
        own = laid_over(layer, base, overrides, None, problems, JobSpec)
        spec = validated(own, str(path), problems, JobSpec)
        if check_files:
            check_program(spec, own, str(path), base=base)
        spec._source = base / source.name
        yield spec


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
    problems: list[Problem] = []
    layer, found = expand(Layer(dict(values)), Path(base).absolute())
    problems += found
    layer = laid_over(layer, Path(base), overrides, profile, problems, JobSpec)
    return validated(layer, "spec", problems, JobSpec)


def laid_over(
    layer: Layer,
    base: Path,
    overrides: Sequence[str],
    profile: ClusterProfile | None,
    problems: list[Problem],
    model: type[JobSpec],
) -> Layer:
    """A file's values over a cluster's defaults, and the overrides over both."""
    if profile is not None:
        layer = merge(profile.defaults(), layer)
    return _overridden(layer, overrides, base, problems, model)


def validated(layer: Layer, source: str, problems: list[Problem], model: type[J]) -> J:
    try:
        spec = model.model_validate(layer.values)
    except ValidationError as error:
        problems += describe(error, model, layer, source)
        problems += conflicts(model, layer, source)
    if problems:
        raise SpecError(report(problems))
    return spec


def _overridden(
    layer: Layer, overrides: Sequence[str], base: Path, problems: list[Problem], model: type[JobSpec]
) -> Layer:
    settings: list[tuple[KeyPath, Any]] = []
    places: dict[KeyPath, Place] = {}
    for text in overrides:
        try:
            path, document = parse_override(text, layer, model)
        except SpecError as error:
            problems += [Problem(override_place(text), line) for line in error.problems]
            continue
        where = {(*path, *below): place for below, place in document.places.items()}
        setting = Layer(put(Layer({}), [(path, document.value)]).values, where)
        expanded, found = expand(setting, base.absolute())
        problems += found
        settings.append((path, _at(expanded.values, path)))
        places.update(where)
    result = put(layer, settings)
    result.places.update(places)
    return result


def _at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values[key]
    return values


def check_program(spec: JobSpec, layer: Layer, source: str, *, base: Path) -> None:
    """A program that is named by its path must be there: better to hear it now than after the queue.

    Args:
        base: the directory of the file.
    """
    programs: dict[KeyPath, Entrypoint] = {("entrypoint",): spec.entrypoint}
    programs |= {("components", name, "entrypoint"): one.entrypoint for name, one in spec.components.items()}
    missing = [_missing(entrypoint, where, layer, source, base) for where, entrypoint in programs.items()]
    if lines := [line for line in missing if line]:
        raise SpecError(lines)


def _missing(entrypoint: Entrypoint, where: KeyPath, layer: Layer, source: str, base: Path) -> str | None:
    if entrypoint.script is not None:
        key, program = "script", entrypoint.script
    elif entrypoint.command is not None and os.path.isabs(entrypoint.command[0]):
        key, program = "command", entrypoint.command[0]
        if elsewhere() is not None and not Path(program).is_relative_to(base):
            return None  # a program of the other machine's
    else:
        return None
    if os.path.isfile(program):
        return None
    path = (*where, key)
    return f"{layer.place(path) or source}: {'.'.join(map(str, path))} {program!r} is not a file"
