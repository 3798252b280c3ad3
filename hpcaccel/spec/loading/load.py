"""Loading a ``JobSpec`` from a YAML file, the files it extends, a cluster's defaults and command-line overrides.

Before a file is merged over the file that it extends, its values are expanded, and its paths are resolved against its
own directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from hpcaccel.errors import SpecError
from hpcaccel.spec.job.entrypoint import EntrypointSection
from hpcaccel.spec.job.fields import checked_text
from hpcaccel.spec.job.job_spec import JobSpec
from hpcaccel.spec.loading.expand import elsewhere, expand, expanded_for, layer_of_values
from hpcaccel.spec.loading.layers import Layer, base_of, document_of, is_pipe, merge, put, read_document
from hpcaccel.spec.loading.overrides import override_place, parse_override
from hpcaccel.spec.loading.problems import conflicts, describe, report
from hpcaccel.spec.yaml12 import Document, KeyPath, Problem, SourceLocation

if TYPE_CHECKING:
    from hpcaccel.spec.cluster.cluster_profile import ClusterProfile

__all__ = [
    "TEXT", "check_program", "laid_over", "layers_of", "load_spec", "load_text", "load_variants", "read_layers",
    "spec_from_values", "validated",
]  # fmt: skip


def read_layers(path: Path, shown: str, problems: list[Problem], chain: tuple[Path, ...] = ()) -> Layer:
    """Read a file and merge it over the files that it extends. Errors in the values are added to ``problems``.

    Args:
        shown: the file's name in messages.
        chain: the files through which this file is extended, the outermost first.

    Raises:
        SpecError: this file or a file that it extends cannot be read, or files extend each other in a cycle.
    """
    return layers_of(read_document(path, shown), path, shown, problems, chain)


def layers_of(
    document: Document, path: Path, shown: str, problems: list[Problem], chain: tuple[Path, ...] = ()
) -> Layer:
    """Merge ``document``, the contents of the file ``path``, over the files that it extends; see ``read_layers``."""
    problems += document.problems
    layer = Layer(document.value, document.places)
    base = layer.values.pop("extends", None)
    place = layer.places.get(("extends",), SourceLocation(shown))
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


def _base(reference: str, place: SourceLocation, path: Path, problems: list[Problem], chain: tuple[Path, ...]) -> Layer:
    with expanded_for(None):  # spec files are on this machine, even if the job will run on another one
        named, found = expand(Layer({"extends": reference}, {("extends",): place}), base_of(path))
    problems += found
    target = _beside(path, os.path.expanduser(named.values["extends"]))
    words = f"extends {reference!r}"
    if _resolved(target) in chain:
        files = " → ".join(file.name for file in (*chain, target))
        raise SpecError([*report(problems), f"{place}: {words} forms a cycle: {files}"])
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
        return path  # reading the file reports the error


def _refuse_function(layer: Layer, problems: list[Problem]) -> None:
    entrypoint = layer.values.get("entrypoint")
    if isinstance(entrypoint, dict) and entrypoint.pop("function", None) is not None:
        place = layer.places[("entrypoint", "function")]
        message = "entrypoint.function can be set only by hpcaccel.submit() in Python: use script, module or command"
        problems.append(Problem(place, message))


J = TypeVar("J", bound=JobSpec)
TEXT = "spec.yaml"
"""Name of a spec that was given as text, in messages."""


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
        path: the YAML file. Paths in this file and in overrides are relative to its directory; paths in a file that it
            extends are relative to that file's directory.
        overrides: texts of the form ``key.sub=value``, which take precedence over all files.
        profile: the cluster's profile, whose defaults have the lowest precedence.
        check_files: require that the script, or a program given as a path, exists.
        function: the name of a Python function to run instead of the file's entrypoint; None to run the entrypoint.

    Raises:
        SpecError: a file or an override is not valid, or a file cannot be read. The error's ``problems`` has one item
            for each problem.
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
    """Yield the spec of a file for each list of overrides. The file is read only once. See ``load_spec``.

    Raises:
        SpecError: a file or an override is not valid, or a file cannot be read; one line per problem.
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


def load_text(
    text: str,
    *,
    base: Path,
    shown: str = TEXT,
    overrides: Sequence[str] = (),
    profile: ClusterProfile | None = None,
) -> JobSpec:
    """Load a spec from the text of a YAML file. Arguments and errors are those of :func:`load_spec`, and:

    Args:
        base: the absolute directory against which relative paths are resolved.
        shown: the name of the text in messages.
    """
    problems: list[Problem] = []
    layer = layers_of(document_of(text, shown), base / "(text)", shown, problems)
    layer = laid_over(layer, base, overrides, profile, problems, JobSpec)
    spec = validated(layer, shown, problems, JobSpec)
    check_program(spec, layer, shown, base=base)
    spec._source = base / shown
    return spec


def spec_from_values(
    values: Mapping[str, Any],
    *,
    base: str | os.PathLike[str] = ".",
    overrides: Sequence[str] = (),
    profile: ClusterProfile | None = None,
) -> JobSpec:
    """Build a spec from Python values, with the same defaults, overrides and messages as for a file.

    Args:
        base: the directory against which relative paths are resolved.

    Raises:
        SpecError: a value or an override is not valid; one line per problem.
    """
    problems: list[Problem] = []
    layer = layer_of_values(values, base, problems)
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
    """Merge the values of a file over the defaults of a cluster, and the overrides over the result."""
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
    places: dict[KeyPath, SourceLocation] = {}
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
    """Check that scripts, and programs given as paths, exist. An error then appears before the job is queued.

    Programs on another machine are not checked.

    Args:
        base: the directory of the spec file.

    Raises:
        SpecError: a script or program does not exist; one line for each.
    """
    programs: dict[KeyPath, EntrypointSection] = {("entrypoint",): spec.entrypoint}
    programs |= {("components", name, "entrypoint"): one.entrypoint for name, one in spec.components.items()}
    missing = [_missing(entrypoint, where, layer, source, base) for where, entrypoint in programs.items()]
    if lines := [line for line in missing if line]:
        raise SpecError(lines)


def _missing(entrypoint: EntrypointSection, where: KeyPath, layer: Layer, source: str, base: Path) -> str | None:
    if entrypoint.script is not None:
        key, program = "script", entrypoint.script
    elif entrypoint.command is not None and os.path.isabs(entrypoint.command[0]):
        key, program = "command", entrypoint.command[0]
        if elsewhere() is not None and not Path(program).is_relative_to(base):
            return None  # a program on the other machine
    else:
        return None
    if os.path.isfile(program):
        return None
    path = (*where, key)
    return f"{layer.place(path) or source}: {'.'.join(map(str, path))} {program!r} is not a file"
