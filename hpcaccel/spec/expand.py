"""Values become what they stand for: ``${env:NAME}``, a leading ``~/``, and paths made absolute against their file.

Everything else stays literal. ``$${env:NAME}`` is the way to write ``${env:NAME}`` itself. ``~`` alone and ``~user``
stand for a home in paths only.

Of a spec that is for another machine (``expanded_for``), variables are that machine's, ``~`` stays as it is written
until the spec is read there, and only the program, which goes along with its code, is named by a path of this one.
Where they choose what goes along, variables are this one's, too.
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

from hpcaccel.spec.container_fields import is_image_path
from hpcaccel.spec.layers import Layer
from hpcaccel.spec.yaml12 import KeyPath, Place, Plain, Problem

__all__ = ["Elsewhere", "elsewhere", "escape", "expand", "expanded_for"]

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
}
_PATHS_WITH_SLASH: set[KeyPath] = {
    ("entrypoint", "command", 0),
    ("environment", "conda"),
    ("environment", "python"),
}
"""Names when they hold no slash (found on PATH, or by conda), paths when they do."""
_RESUME: KeyPath = ("checkpoint", "resume")
_IMAGE: KeyPath = ("container", "image")
_STAGED: KeyPath = ("stage", "sources")
_CHOOSE_WHAT_GOES: tuple[KeyPath, ...] = (
    ("entrypoint", "script"),
    ("entrypoint", "module"),
    ("code",),
    ("environment", "secrets"),
)
"""What goes to the other machine is chosen by this one's variables: somebody may have taken the other one over."""
_PROGRAM: KeyPath = ("entrypoint", "command", 0)


@dataclass(frozen=True)
class Elsewhere:
    """The machine that a spec is for."""

    name: str
    variable: Callable[[str], str | None]
    """The value of one of its environment variables; None where that is not set."""


_ELSEWHERE: ContextVar[Elsewhere | None] = ContextVar("_ELSEWHERE", default=None)


def elsewhere() -> Elsewhere | None:
    """The machine that specs are read for at this moment; None: this one."""
    return _ELSEWHERE.get()


@contextmanager
def expanded_for(machine: Elsewhere | None) -> Iterator[None]:
    """Specs that are read in the block are for ``machine``."""
    token = _ELSEWHERE.set(machine)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


def expand(layer: Layer, base: Path) -> tuple[Layer, list[Problem]]:
    """The layer with every value expanded and every path resolved against the directory ``base``, and the problems."""
    walker = _Walker(layer, base)
    values = walker.walk(layer.values, ())
    return Layer(values, layer.places), walker.problems


def escape(value: Any) -> Any:
    """``value`` (text, or lists and mappings of it) so that ``expand`` gives it back."""
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
        text = value.text if isinstance(value, Plain) else value
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
            self.problem(path, f"{match[0]!r} is not understood: write ${{env:NAME}} with the name of a variable")
            return match[0]
        there = self.elsewhere if self.is_for_elsewhere(path) else None
        value = os.environ.get(match["name"]) if there is None else there.variable(match["name"])
        if value is None:
            where = "in your environment" if there is None else f"on {there.name}, whose environment is meant"
            self.problem(path, f"asks for ${{env:{match['name']}}}, but {match['name']} is not set {where}")
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
        """A path of the other machine. A relative one is of what lies beside the file, and only code goes along."""
        assert self.elsewhere is not None
        expanded = self.text(value, path)
        if not expanded.strip() or "\0" in expanded or expanded.startswith(("~", "${env:")):
            return expanded
        beside = os.path.normpath(self.base / expanded)
        goes_along = _role(path) == _PROGRAM and Path(beside).is_relative_to(os.path.normpath(self.base))
        if goes_along and any(match["name"] for match in _ENV.finditer(value)):
            self.problem(
                path,
                f"{value!r} would be {beside} by the variables of {self.elsewhere.name}, a file of this machine, which "
                "goes there with its folder. If that is meant, write it relative to this file: ./run.sh",
            )
            return expanded
        if os.path.isabs(expanded):
            return os.path.normpath(expanded)
        if goes_along:
            return beside
        self.problem(
            path,
            f"{value!r} is relative to this file, and {self.elsewhere.name} is another machine: only the code goes "
            "there. Write a path of the cluster's, absolute or ~/…",
        )
        return expanded

    def problem(self, path: KeyPath, message: str) -> None:
        dotted = ".".join(str(part) for part in path)
        self.problems.append(Problem(self.layer.place(path) or Place("spec"), f"{dotted} {message}"))


def _role(path: KeyPath) -> KeyPath:
    """The program of a component is named as the ranks' own is."""
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
