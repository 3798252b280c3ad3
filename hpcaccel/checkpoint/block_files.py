"""Manifest and index of a checkpoint of several blocks of ranks, in parts. Does not import torch.

``index.json`` has dtype and shape of every tensor that is not a rank's own, and the chunks of those that have few. The
other chunks are in the part of the index beside the files that contain them, ``block_00001/index.json``.
``ranges.json`` has the part of each tensor that a block holds. ``block_00001/files.json`` has sizes and CRCs of the
block's files and of its part of the index; the manifest has its CRC, under ``blocks``.

So a rank that loads what its block has saved needs ``index.json`` and the two files of this block: they do not grow
with the number of blocks. Only a rank that loads something else reads ``ranges.json``, and the parts that it needs.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcaccel.checkpoint.rank_blocks import Block
from hpcaccel.checkpoint.shard_files import crc32
from hpcaccel.checkpoint_files import manifest
from hpcaccel.checkpoint_files.contents import OWN_KEYS
from hpcaccel.core.durable_files import FILE_MODE, fsync_directory

__all__ = ["FileTable", "write_parts"]

FileTable = dict[str, dict[str, Any]]
"""Size and CRC of files, by path in the checkpoint."""


def write_parts(
    checkpoint: Path, index: bytes, files: FileTable, attached: Iterable[str], block: Block
) -> tuple[FileTable, dict[str, Any]]:
    """Write the parts of the index and of the table of files.

    Args:
        index: the complete index in one piece.
        files: the files of all ranks, and the attached ones.
        attached: those that belong to no block.
        block: the first block.

    Returns:
        The files that the manifest lists itself, and its fields about blocks.
    """
    whole, parts, ranges = _split(json.loads(index)["tensors"], most=block.ranks)
    of_block: defaultdict[str, FileTable] = defaultdict(dict)
    own = {name: files[name] for name in attached}
    for name, entry in files.items():
        if name not in own:
            of_block[name.partition("/")[0]][name] = entry
    blocks = {}
    for name, table in sorted(of_block.items()):
        part = f"{name}/{manifest.INDEX}"
        table[part] = _write(checkpoint / part, {"version": manifest.PARTS_VERSION, "tensors": parts[name]})
        blocks[name] = _write(checkpoint / name / manifest.FILES, {"files": table})
        fsync_directory(checkpoint / name)
    own[manifest.INDEX] = _write(checkpoint / manifest.INDEX, {"version": manifest.PARTS_VERSION, "tensors": whole})
    own[manifest.RANGES] = _write(checkpoint / manifest.RANGES, {"ranges": ranges})
    return own, {"version": manifest.PARTS_VERSION, "blocks": blocks, "block_ranks": block.ranks}


def _split(
    tensors: Mapping[str, Any], *, most: int
) -> tuple[dict[str, Any], defaultdict[str, dict[str, Any]], dict[str, Any]]:
    """Divide an index: ``index.json``, the parts by block, and the ranges of each tensor by block.

    Args:
        most: a tensor with at most so many chunks is in ``index.json`` as a whole.
    """
    whole: dict[str, Any] = {}
    ranges: dict[str, Any] = {}
    parts: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for key, tensor in tensors.items():
        is_own = key.startswith(OWN_KEYS)
        if len(tensor["chunks"]) <= most and not is_own:
            whole[key] = tensor
            continue
        by_block: defaultdict[str, list[Any]] = defaultdict(list)
        for chunk in tensor["chunks"]:
            by_block[chunk["file"].partition("/")[0]].append(chunk)
        head = {"dtype": tensor["dtype"], "shape": tensor["shape"]}
        for name, chunks in by_block.items():
            parts[name][key] = {**head, "chunks": chunks}
        if not is_own:
            whole[key] = {**head, "chunks": []}
            ranges[key] = {name: _bounds(chunks) for name, chunks in by_block.items()}
    return whole, parts, ranges


def _bounds(chunks: list[Any]) -> list[list[int]]:
    """The smallest box that contains all chunks: begin and end in each dimension."""
    begins = zip(*(chunk["at"] for chunk in chunks), strict=True)
    ends = zip(*([at + size for at, size in zip(c["at"], c["shape"], strict=True)] for c in chunks), strict=True)
    return [[min(begin), max(end)] for begin, end in zip(begins, ends, strict=True)]


def _write(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write and sync a new file. Returns its size and CRC."""
    text = json.dumps(content, separators=(",", ":")).encode()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(text), "crc32": f"{crc32(text):08x}"}
