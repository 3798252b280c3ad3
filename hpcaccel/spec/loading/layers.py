"""Layers of settings: reading a YAML file into a layer, and merging layers (profile, base files, file, overrides).

Mappings are merged key by key; any other value, including a list, replaces the value of the lower layer. A spec can
also come from standard input (``-``) or a FIFO (``<(…)``). A pipe can be read only once, so its contents are kept.
Relative paths in a spec from a pipe are resolved against the current directory.
"""

from __future__ import annotations

import difflib
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcaccel.core.formatting import shortened
from hpcaccel.core.progress_notes import show_note_when_slow
from hpcaccel.errors import SpecError
from hpcaccel.spec.job.entrypoint import EntrypointSection
from hpcaccel.spec.job.environment_fields import EnvironmentSection
from hpcaccel.spec.job.notify_fields import NotifySection
from hpcaccel.spec.job.slurm import SlurmSection, requests_gpus
from hpcaccel.spec.loading.spec_version import to_current
from hpcaccel.spec.yaml12 import Document, KeyPath, SourceLocation, parse_yaml

__all__ = ["Layer", "base_of", "document_of", "is_pipe", "merge", "put", "read_document", "read_pipe"]


_RIVALS: dict[str, tuple[tuple[str, ...], ...]] = {
    "entrypoint": EntrypointSection.rivals,
    "slurm": (*SlurmSection.rivals, ("gpus_per_node", "gpus_per_task", "gres")),
    "environment": EnvironmentSection.rivals,
    "notify": NotifySection.rivals,
}


@dataclass
class Layer:
    """Settings, with the source location of each."""

    values: dict[str, Any]
    places: dict[KeyPath, SourceLocation] = field(default_factory=dict)

    def place(self, path: KeyPath) -> SourceLocation | None:
        """The location of a value, or of the innermost enclosing mapping or list that has one."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return None


def merge(lower: Layer, upper: Layer) -> Layer:
    """Merge ``upper`` over ``lower`` into a new layer."""
    settings = [(path, value) for path, value in _leaves(upper.values, ()) if value != {} or not _mapping(lower, path)]
    result = put(lower, settings)
    result.places.update(upper.places)
    return result


def put(lower: Layer, settings: Sequence[tuple[KeyPath, Any]]) -> Layer:
    """A copy of ``lower`` with the values in ``settings`` set.

    A setting also removes the settings of ``lower`` that conflict with it (``mem_per_cpu`` removes ``mem``). If two of
    the new settings conflict, both stay, and validation reports them.
    """
    result = Layer(_copied(lower.values))
    gone: set[KeyPath] = set()
    for path, value in settings:
        section = result.values.get(str(path[0]))
        for rival in _rivals(path, value):
            if isinstance(section, dict) and _stands(rival, section):
                del section[rival]
                gone.add((path[0], rival))
    for path, value in settings:
        target = result.values
        for key in path[:-1]:
            if not isinstance(target.get(str(key)), dict):
                target[str(key)] = {}
            target = target[str(key)]
        target[str(path[-1])] = _copied(value)
        gone.add(path)
    result.places = {key: place for key, place in lower.places.items() if not _is_below(key, gone)}
    return result


def _stands(rival: str, section: Mapping[str, Any]) -> bool:
    return section.get(rival) is not None and (rival != "gres" or requests_gpus("gres", section["gres"]))


def _rivals(path: KeyPath, value: Any) -> list[str]:
    if len(path) < 2 or value is None:
        return []
    key = str(path[1])
    if key == "gres" and not requests_gpus("gres", value):
        return []
    groups = _RIVALS.get(str(path[0]), ())
    return [rival for group in groups if key in group for rival in group if rival != key]


def _leaves(values: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _mapping(layer: Layer, path: KeyPath) -> bool:
    """Whether ``layer`` has a mapping at ``path``. Merging an empty mapping over a mapping changes nothing."""
    value: Any = layer.values
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return isinstance(value, Mapping)


def _is_below(key: KeyPath, places: set[KeyPath]) -> bool:
    return any(key[:length] in places for length in range(len(key) + 1))


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


STDIN = "-"
_read: dict[str, bytes] = {}


def is_pipe(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is standard input (``-``), a FIFO, a character device or a socket."""
    if os.fspath(path) == STDIN:
        return True
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)


def base_of(path: str | os.PathLike[str]) -> Path:
    """The absolute directory against which relative paths in the spec at ``path`` are resolved."""
    return Path.cwd() if is_pipe(path) else Path(path).absolute().parent


def read_pipe(path: Path, most: int) -> bytes:
    """Read up to ``most`` + 1 bytes from a pipe. Later calls return the same bytes.

    Raises:
        OSError: the pipe cannot be read.
    """
    name = os.fspath(path)
    if name not in _read:
        what = "standard input" if name == STDIN else f"{name}, a pipe"
        with show_note_when_slow(f"waiting for a spec from {what} (Ctrl-C to cancel)"):
            _read[name] = sys.stdin.buffer.read(most + 1) if name == STDIN else _bytes(path, most + 1)
    return _read[name]


def _bytes(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most)


MAX_FILE_BYTES = 4_000_000


def read_document(path: Path, shown: str) -> Document:
    """Read the mapping in a YAML file; ``shown`` is the file's name in messages.

    Raises:
        SpecError: the file cannot be read, is not YAML, or has no mapping at the top level.
    """
    return document_of(_text(path, shown), shown)


def document_of(text: str, shown: str) -> Document:
    """The mapping in the text of a YAML file, in the current format (see ``spec_version``).

    Arguments and errors are those of :func:`read_document`.
    """
    document = parse_yaml(text, shown)
    if document.value is None and not document.problems:
        raise SpecError(f"{shown}: the file is empty. Create a spec file with `hpcaccel init`")
    if document.problems and not isinstance(document.value, dict):
        raise SpecError(list(map(str, document.problems)))
    if not isinstance(document.value, dict):
        kind = "a list" if isinstance(document.value, list) else "a single value"
        raise SpecError(f"{shown}: the file must contain a mapping (name: …, entrypoint: …), not {kind}")
    values, places, problems = to_current(document.value, document.places, shown)
    return Document(values, places, [*document.problems, *problems])


def _text(path: Path, shown: str) -> str:
    try:
        if is_pipe(path):
            return _decoded(read_pipe(path, MAX_FILE_BYTES), shown)
        if path.is_dir():
            raise SpecError(f"{shown} is a directory, not a YAML file{_candidates(path)}")
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise SpecError(f"{shown}: no such file{_similar(path)}") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{shown} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return _decoded(data, shown)


def _decoded(data: bytes, shown: str) -> str:
    if len(data) > MAX_FILE_BYTES:
        raise SpecError(f"{shown} is larger than {MAX_FILE_BYTES} bytes, the maximum for a spec file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{shown}:{line}: not UTF-8 text (byte 0x{data[error.start]:02x})") from None


def _similar(path: Path) -> str:
    """A hint that names the YAML file in the same directory whose name is closest to that of ``path``; "" if no name is
    close."""
    try:
        names = sorted(item.name for item in path.parent.iterdir() if item.suffix in (".yaml", ".yml"))
    except OSError:
        return ""
    match = difflib.get_close_matches(path.name, names, n=1)
    return f". Did you mean {str(path.with_name(match[0]))!r}?" if match else ""


def _candidates(path: Path) -> str:
    try:
        names = sorted(item.name for item in path.iterdir() if item.suffix in (".yaml", ".yml"))
    except OSError:
        return ""
    return f" (it contains {shortened(names, 5)})" if names else ""
