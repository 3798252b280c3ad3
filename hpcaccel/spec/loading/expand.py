"""Expansion of spec values: ``${env:NAME}``, a leading ``~/``, and paths, which are resolved against their file.

Everything else stays literal. ``$${env:NAME}`` is a literal ``${env:NAME}``. ``~`` alone and ``~user`` are expanded in
paths only.

In a spec for another machine (``expanded_for``), variables have their values on that machine, and ``~`` is expanded
there. Only the program may be a local path, because it is copied with the code. Settings that choose what is copied use
this machine's variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel.spec.job.environment_fields import is_image_path
from hpcaccel.spec.loading.layers import Layer
from hpcaccel.spec.loading.spec_version import to_current
from hpcaccel.spec.yaml12 import KeyPath, PlainScalar, Problem, SourceLocation

__all__ = ["Elsewhere", "elsewhere", "escape", "expand", "expanded_for", "layer_of_values"]

_ENV = re.compile(
    r"(?P<literal>\$\$\{env:)|\$\{env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)\}|(?P<wrong>\$\{env:[^}]*\}?)", re.ASCII
)
_SHELL_VARIABLE = re.compile(r"\$(?:\{(?!env:)([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", re.ASCII)
_PATHS: set[KeyPath] = {
    ("entrypoint", "script"),
    ("workdir",),
    ("environment", "venv"),
    ("runs_dir",),
    ("templates",),
    ("notify", "webhook_file"),
}
_PATHS_WITH_SLASH: set[KeyPath] = {
    ("entrypoint", "command", 0),
    ("environment", "conda"),
    ("environment", "python"),
}
"""Settings that are paths if they contain a slash or begin with ``~``; other values are names that are looked up on
PATH or by conda."""
_RESUME: KeyPath = ("checkpoint", "resume")
_IMAGE: KeyPath = ("container", "image")
_STAGED: KeyPath = ("stage", "sources")
_CHOOSE_WHAT_GOES: tuple[KeyPath, ...] = (
    ("entrypoint", "script"),
    ("entrypoint", "module"),
    ("code",),
    ("environment", "secrets"),
)
"""Settings that choose what is copied to the other machine. They use this machine's variables only: the other machine
may be compromised, and its variables must not select local files."""
_PROGRAM: KeyPath = ("entrypoint", "command", 0)


@dataclass(frozen=True)
class Elsewhere:
    """Another machine, on which the job of a spec will run."""

    name: str
    variable: Callable[[str], str | None]
    """Called with the name of an environment variable; returns its value on that machine, None if it is not set."""


_ELSEWHERE: ContextVar[Elsewhere | None] = ContextVar("_ELSEWHERE", default=None)


def elsewhere() -> Elsewhere | None:
    """The machine for which specs are currently read; None stands for this machine."""
    return _ELSEWHERE.get()


@contextmanager
def expanded_for(machine: Elsewhere | None) -> Iterator[None]:
    """Context manager: specs read inside the block are for ``machine`` (None: this machine)."""
    token = _ELSEWHERE.set(machine)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


def expand(layer: Layer, base: Path) -> tuple[Layer, list[Problem]]:
    """Expand all values of ``layer`` and resolve its paths against the directory ``base``.

    Returns the new layer and the problems found.
    """
    walker = _Walker(layer, base)
    values = walker.walk(layer.values, ())
    return Layer(values, layer.places), walker.problems


def escape(value: Any) -> Any:
    """Escape ``${env:`` in ``value`` (text, or lists and mappings of text), so that ``expand`` keeps it literal."""
    if isinstance(value, str):
        return value.replace("${env:", "$${env:")
    if isinstance(value, Mapping):
        return {key: escape(item) for key, item in value.items()}
    return [escape(item) for item in value] if isinstance(value, list) else value


class _Walker:
    def __init__(self, layer: Layer, base: Path) -> None:
        self.layer = layer
        self.base = base
        self.elsewhere = elsewhere()
        self.problems: list[Problem] = []

    def walk(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, Mapping):
            return {key: self.walk(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self.walk(item, (*path, index)) for index, item in enumerate(value)]
        if isinstance(value, os.PathLike):
            value = str(value)
        text = value.text if isinstance(value, PlainScalar) else value
        if not isinstance(text, str):
            return value
        if path[:2] == ("container", "mounts"):
            source, colon, rest = text.partition(":")
            return self.path(source, path) + colon + rest
        if _is_path(path, text):
            return self.path(text, path)
        return self.text(value, path) if isinstance(value, str) else value

    def text(self, value: str, path: KeyPath) -> str:
        expanded = _ENV.sub(lambda match: self.variable(match, path), value)
        if value.startswith("~/") and not self.is_for_elsewhere(path):
            return os.path.expanduser("~") + expanded[1:]
        return expanded

    def variable(self, match: re.Match[str], path: KeyPath) -> str:
        if match["literal"]:
            return "${env:"
        if match["wrong"]:
            self.problem(
                path, f"{match[0]!r} is not valid: write ${{env:NAME}} with the name of an environment variable"
            )
            return match[0]
        there = self.elsewhere if self.is_for_elsewhere(path) else None
        value = os.environ.get(match["name"]) if there is None else there.variable(match["name"])
        if value is None:
            where = "in your environment" if there is None else f"on {there.name}, where it is expanded"
            self.problem(path, f"uses ${{env:{match['name']}}}, but {match['name']} is not set {where}")
            return match[0]
        return value

    def is_for_elsewhere(self, path: KeyPath) -> bool:
        role = _role(path)
        return self.elsewhere is not None and not any(role[: len(one)] == one for one in _CHOOSE_WHAT_GOES)

    def path(self, value: str, path: KeyPath) -> str:
        variable = _SHELL_VARIABLE.search(value)
        if variable:
            name = variable[1] or variable[2]
            right = value.replace(variable[0], f"${{env:{name}}}")
            self.problem(path, f"{value!r}: ${name} is not expanded here. Write {right}")
            return value
        if self.is_for_elsewhere(path):
            return self.path_elsewhere(value, path)
        expanded = os.path.expanduser(self.text(value, path))
        if not expanded.strip() or "\0" in expanded:
            return expanded
        return os.path.normpath(self.base / expanded)

    def path_elsewhere(self, value: str, path: KeyPath) -> str:
        """Expand a path on the other machine. It must be absolute there or begin with ``~``. Only a program in the spec
        file's directory may have a relative path, because that program is copied to the other machine."""
        assert self.elsewhere is not None
        expanded = self.text(value, path)
        if not expanded.strip() or "\0" in expanded or expanded.startswith(("~", "${env:")):
            return expanded
        beside = os.path.normpath(self.base / expanded)
        goes_along = _role(path) == _PROGRAM and Path(beside).is_relative_to(os.path.normpath(self.base))
        if goes_along and any(match["name"] for match in _ENV.finditer(value)):
            self.problem(
                path,
                f"{value!r} expands to {beside} with the variables of {self.elsewhere.name}, but that is a file on "
                f"this machine, whose folder would be copied to {self.elsewhere.name}. If that is intended, write the "
                "path relative to this file: ./run.sh",
            )
            return expanded
        if os.path.isabs(expanded):
            return os.path.normpath(expanded)
        if goes_along:
            return beside
        self.problem(
            path,
            f"{value!r} is relative to this file, but the job runs on {self.elsewhere.name}, and only the code is "
            "copied there. Write a path on the cluster: absolute or ~/…",
        )
        return expanded

    def problem(self, path: KeyPath, message: str) -> None:
        dotted = ".".join(str(part) for part in path)
        self.problems.append(Problem(self.layer.place(path) or SourceLocation("spec"), f"{dotted} {message}"))


def _role(path: KeyPath) -> KeyPath:
    """The path of a setting. For a setting of a component's entrypoint, the path of the same setting of the job's own
    entrypoint."""
    return path[2:] if path[:1] == ("components",) and path[2:3] == ("entrypoint",) else path


def _is_path(path: KeyPath, text: str) -> bool:
    path = _role(path)
    if path == _RESUME:
        return text not in ("auto", "never")
    if path == _IMAGE:
        return is_image_path(text)
    if path[:2] == _STAGED:
        return True
    return path in _PATHS or (path in _PATHS_WITH_SLASH and ("/" in text or text.startswith("~")))


def layer_of_values(values: Mapping[str, Any], base: str | os.PathLike[str], problems: list[Problem]) -> Layer:
    """Python values as the layer of a file in the directory ``base``. Problems are added to ``problems``."""
    own, _, renamed = to_current(dict(values), {}, "spec")
    layer, found = expand(Layer(own), Path(base).absolute())
    problems += [*renamed, *found]
    return layer
