"""Values become what they stand for: ``${env:NAME}``, a leading ``~/``, and paths made absolute against their file.

Everything else stays literal. ``$${env:NAME}`` is the way to write ``${env:NAME}`` itself. ``~`` alone and ``~user``
stand for a home in paths only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcaccel.spec.container import is_image_path
from hpcaccel.spec.layers import Layer
from hpcaccel.spec.yaml12 import KeyPath, Place, Plain, Problem

__all__ = ["escape", "expand"]

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
        if value.startswith("~/"):
            return os.path.expanduser("~") + expanded[1:]
        return expanded

    def variable(self, match: re.Match[str], path: KeyPath) -> str:
        if match["literal"]:
            return "${env:"
        if match["wrong"]:
            self.problem(path, f"{match[0]!r} is not understood: write ${{env:NAME}} with the name of a variable")
            return match[0]
        value = os.environ.get(match["name"])
        if value is None:
            self.problem(path, f"asks for ${{env:{match['name']}}}, but {match['name']} is not set in your environment")
            return match[0]
        return value

    def path(self, value: str, path: KeyPath) -> str:
        variable = _SHELL_VARIABLE.search(value)
        if variable:
            name = variable[1] or variable[2]
            right = value.replace(variable[0], f"${{env:{name}}}")
            self.problem(path, f"{value!r}: ${name} is not expanded here. Write {right}")
            return value
        expanded = os.path.expanduser(self.text(value, path))
        if not expanded.strip() or "\0" in expanded:
            return expanded
        return os.path.normpath(self.base / expanded)

    def problem(self, path: KeyPath, message: str) -> None:
        dotted = ".".join(str(part) for part in path)
        self.problems.append(Problem(self.layer.place(path) or Place("spec"), f"{dotted} {message}"))


def _is_path(path: KeyPath, text: str) -> bool:
    if path == _RESUME:
        return text not in ("auto", "never")
    if path == _IMAGE:
        return is_image_path(text)
    if path[:2] == _STAGED:
        return True
    return path in _PATHS or (path in _PATHS_WITH_SLASH and ("/" in text or text.startswith("~")))
