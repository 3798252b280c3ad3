"""Reading a YAML file that a user named, with a message for everything that can be wrong with it."""

from __future__ import annotations

import difflib
from pathlib import Path

from hpcaccel.errors import SpecError
from hpcaccel.spec.pipes import is_pipe, read_pipe
from hpcaccel.spec.yaml12 import Document, parse_yaml

__all__ = ["read_document"]

MAX_FILE_BYTES = 4_000_000


def read_document(path: Path, shown: str) -> Document:
    """The mapping in a YAML file; ``shown`` is how messages name the file.

    Raises:
        SpecError: the file cannot be read, is not YAML, or holds no mapping.
    """
    document = parse_yaml(_text(path, shown), shown)
    if document.value is None and not document.problems:
        raise SpecError(f"{shown}: the file is empty. `hpcaccel init` writes one to start from")
    if document.problems and not isinstance(document.value, dict):
        raise SpecError(list(map(str, document.problems)))
    if not isinstance(document.value, dict):
        kind = "a list" if isinstance(document.value, list) else "a single value"
        raise SpecError(f"{shown}: the file must hold a mapping (name: …, entrypoint: …), not {kind}")
    return document


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
        raise SpecError(f"{shown} is larger than {MAX_FILE_BYTES} bytes: not a spec")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{shown}:{line}: not UTF-8 text (byte 0x{data[error.start]:02x})") from None


def _similar(path: Path) -> str:
    """The YAML files beside a file that does not exist, the closest first."""
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
    return f" (it holds {', '.join(names[:5])})" if names else ""
