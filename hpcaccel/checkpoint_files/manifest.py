"""The manifest and the index of a checkpoint, read and checked without torch.

``COMMITTED`` holds the size and CRC of every file and its own CRC, over its canonical JSON; ``index.json`` says where
each tensor lies, each chunk with offset, length and CRC. So the one vouches for the other, and that for every byte.
"""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.errors import CheckpointError, Damaged

__all__ = ["INDEX", "VERSION", "read", "read_file", "read_index", "read_manifest", "seal", "wrong_sizes"]

VERSION = 1
INDEX = "index.json"


def seal(manifest: dict[str, Any]) -> bytes:
    """The bytes of a manifest with its own CRC."""
    body = {key: value for key, value in manifest.items() if key != "crc32"}
    return _canonical({**body, "crc32": f"{zlib.crc32(_canonical(body)):08x}"})


def read(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint in ``path``, its CRC and the sizes of all its files checked.

    Raises:
        Damaged: it is not what was committed.
        CheckpointError: a newer hpcaccel wrote it.
    """
    manifest = read_manifest(path)
    for problem in wrong_sizes(path, manifest):
        raise Damaged(problem)
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest alone, its CRC checked.

    Raises:
        Damaged: it is not what was committed.
        CheckpointError: a newer hpcaccel wrote it.
    """
    where = path / checkpoint_files.MANIFEST
    text = read_file(where)
    try:
        manifest = json.loads(text)
    except ValueError:
        raise Damaged(f"{where} is damaged: it is not valid JSON") from None
    if not isinstance(manifest, dict) or seal(manifest) != text:
        raise Damaged(f"{where} is damaged: its CRC does not match its content")
    if not isinstance(manifest.get("version"), int) or not isinstance(manifest.get("files"), dict):
        raise Damaged(f"{where} is no manifest of a checkpoint")
    if manifest["version"] > VERSION:
        raise CheckpointError(
            f"{where} has version {manifest['version']}, written by a newer hpcaccel; this one reads up to {VERSION}"
        )
    return manifest


def wrong_sizes(path: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """Each file that is missing or not as long as it was, in words."""
    for name, file in manifest["files"].items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            yield f"{path / name} is missing"
            continue
        if size != file["bytes"]:
            yield f"{path / name} has {size} bytes, {file['bytes']} were committed"


def read_index(path: Path, manifest: dict[str, Any]) -> bytes:
    """The text of a checkpoint's index, checked.

    Raises:
        Damaged: the index is not what was committed.
    """
    text = read_file(path / INDEX)
    if zlib.crc32(text) != int(manifest["files"][INDEX]["crc32"], 16):
        raise Damaged(f"{path / INDEX} is damaged: its CRC does not match the manifest")
    return text


def read_file(path: Path) -> bytes:
    """
    Raises:
        Damaged: there is no such file, or the disk has lost it.
        OSError: it cannot be read now: of a file system that is away nobody may conclude that its files are damaged.
    """
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{path} is missing") from None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
