"""Read and verify the manifest and the index of a checkpoint, without torch.

The manifest, ``COMMITTED``, contains the sizes and CRCs of the ranks' files and of the index, and the CRC of its own
canonical JSON. ``index.json`` contains, for each chunk of each tensor, file, offset, length and CRC. The manifest's CRC
therefore protects the index, and the index protects every byte of the ranks' files.

A checkpoint of many ranks has both in parts, one for each block of ranks (see ``checkpoint.block_files``): the manifest
has the CRC of each block's ``files.json``, which has the sizes and CRCs of its ranks' files and of its part of the
index.
"""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.errors import CheckpointError, Damaged

__all__ = [
    "FILES",
    "INDEX",
    "PARTS_VERSION",
    "RANGES",
    "VERSION",
    "combined_crc",
    "index_names",
    "read",
    "read_block",
    "read_block_table",
    "read_file",
    "read_head",
    "read_index",
    "read_listed",
    "read_manifest",
    "seal",
    "with_blocks",
    "wrong_sizes",
]

VERSION = 1
"""Version of the format of a checkpoint whose ranks form one block."""
PARTS_VERSION = 2
"""Version of the format of a checkpoint of several blocks. Checkpoints of newer versions are rejected."""
INDEX = "index.json"
FILES = "files.json"
"""The sizes and CRCs of a block's files."""
RANGES = "ranges.json"
"""Which part of each tensor a block holds."""
MANY_FILES = 64
"""The sizes of more files than this are looked up by several threads."""
LOOKUP_THREADS = 32
_POLYNOMIAL = 0xEDB88320
"""Polynomial of CRC32, lowest power in the highest bit."""


def seal(manifest: dict[str, Any]) -> bytes:
    """The bytes of ``COMMITTED``: ``manifest`` as canonical JSON, with the CRC of this JSON added."""
    body = {key: value for key, value in manifest.items() if key != "crc32"}
    return _canonical({**body, "crc32": f"{zlib.crc32(_canonical(body)):08x}"})


def read(path: Path) -> dict[str, Any]:
    """Read the manifest of the checkpoint ``path``, and verify its CRC and the sizes of the files that it lists.

    Returns:
        The manifest; ``files`` includes the files of all blocks.

    Raises:
        Damaged: the manifest or a file is missing, or the manifest or a file size differs from the committed one.
        CheckpointError: a newer hpcaccel wrote the checkpoint.
    """
    return _sizes_checked(path, with_blocks(path, read_manifest(path)))


def read_head(path: Path) -> dict[str, Any]:
    """Like ``read``, but without the files of blocks."""
    return _sizes_checked(path, read_manifest(path))


def _sizes_checked(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    for problem in wrong_sizes(path, manifest):
        raise Damaged(problem)
    return manifest


def with_blocks(path: Path, manifest: dict[str, Any], problems: list[str] | None = None) -> dict[str, Any]:
    """The manifest, with the files of all blocks added to ``files``.

    Args:
        problems: receives messages about damaged tables of files; None raises the first one.

    Raises:
        Damaged: the table of a block's files is missing or damaged.
    """
    files = dict(manifest["files"])
    for name, entry in manifest.get("blocks", {}).items():
        try:
            files |= {**read_block(path, manifest, name), f"{name}/{FILES}": entry}
        except Damaged as error:
            if problems is None:
                raise
            problems.append(str(error))
    return {**manifest, "files": files}


def read_block(path: Path, manifest: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The sizes and CRCs of the files of a block.

    Raises:
        Damaged: their table is missing, or differs from the committed one.
    """
    return dict(read_block_table(path, manifest, name)["files"])


def read_block_table(path: Path, manifest: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The content of a block's ``files.json``.

    Raises:
        Damaged: it is missing, or differs from the committed one.
    """
    return dict(json.loads(read_listed(path, {f"{name}/{FILES}": manifest["blocks"][name]}, f"{name}/{FILES}")))


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest and verify its CRC, but not the files.

    Raises:
        Damaged: the manifest is missing, or differs from the committed one.
        CheckpointError: a newer hpcaccel wrote the checkpoint.
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
        raise Damaged(f"{where} is not the manifest of a checkpoint")
    if manifest["version"] > PARTS_VERSION:
        raise CheckpointError(
            f"{where} has format version {manifest['version']}, written by a newer hpcaccel; this one reads versions "
            f"up to {PARTS_VERSION}. Upgrade hpcaccel"
        )
    return manifest


def wrong_sizes(path: Path, manifest: dict[str, Any]) -> Iterator[str]:
    """Messages about files that are missing or do not have the committed size."""
    files = manifest["files"]
    for (name, file), size in zip(files.items(), _sizes([path / name for name in files]), strict=True):
        if size is None:
            yield f"{path / name} is missing"
        elif size != file["bytes"]:
            yield f"{path / name} has {size} bytes, but {file['bytes']} were committed"


def _sizes(paths: list[Path]) -> Iterator[int | None]:
    """The size of each file; None if it is missing. Many files are looked up by several threads, because a lookup on a
    shared file system mostly waits."""
    if len(paths) <= MANY_FILES:
        yield from map(_size, paths)
        return
    from concurrent.futures import ThreadPoolExecutor  # commands that read one small manifest start faster without

    with ThreadPoolExecutor(LOOKUP_THREADS) as threads:
        yield from threads.map(_size, paths)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def index_names(manifest: Mapping[str, Any]) -> list[str]:
    """The files of the index: ``index.json`` and the part of each block."""
    return [INDEX, *(f"{name}/{INDEX}" for name in manifest.get("blocks", ()))]


def read_index(path: Path, manifest: dict[str, Any]) -> bytes:
    """Read the text of ``index.json`` and verify its CRC.

    Raises:
        Damaged: the index is missing, or differs from the committed one.
    """
    return read_listed(path, manifest["files"], INDEX)


def read_listed(path: Path, files: Mapping[str, Any], name: str) -> bytes:
    """Read the file ``name`` of the checkpoint ``path``, and verify its CRC.

    Args:
        files: the table that has the CRC.

    Raises:
        Damaged: the file is missing, or differs from the committed one.
    """
    text = read_file(path / name)
    if zlib.crc32(text) != int(files[name]["crc32"], 16):
        raise Damaged(f"{path / name} is damaged: its CRC does not match the manifest")
    return text


def read_file(path: Path) -> bytes:
    """The content of a file.

    Raises:
        Damaged: the file does not exist, or the disk reports an I/O error.
        OSError: any other error. It is not reported as damage, because the file system may only be unreachable.
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


def combined_crc(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC32 of concatenated parts, computed without their data: from (CRC32, length in bytes) of each part."""
    whole = 0
    for crc, length in parts:
        whole = _multiply(_shift(length), whole) ^ crc
    return whole


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """x to the power of 8 · length, modulo the polynomial: the factor by which ``length`` zero bytes change a CRC."""
    power, result = 0x40000000, 1 << 31  # x and 1, lowest power in the highest bit
    for _ in range(3):
        power = _multiply(power, power)
    while length:
        if length & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        length >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
