"""Manifest and index of a checkpoint of several blocks of ranks, in parts. Does not import torch.

``index.json`` has dtype and shape of every tensor that is not a rank's own, and the chunks of those that have few. The
other chunks are in the part of the index beside the files that contain them, ``block_00001/index.json``.
``ranges.json`` has the part of each tensor that a block holds. ``block_00001/files.json`` has sizes and CRCs of the
block's files and of its part of the index; the manifest has its CRC, under ``blocks``. ``beside`` in it names the other
blocks that have saved chunks of this block's ranks, whose replicas they have (hybrid sharding).

A writer of the block writes its files, once all of its ranks have reported (``save_reports``); rank 0's writer needs
the ``BlockSummary`` of each block for the rest.

So a rank that loads what its block has saved needs ``index.json`` and the two files of this block, and of those beside
it: they do not grow with the number of blocks. Only a rank that loads something else reads ``ranges.json``, and the
parts that it needs.
"""

from __future__ import annotations

import json
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hpcaccel.checkpoint.rank_blocks import Block, block_name
from hpcaccel.checkpoint.shard_files import crc32
from hpcaccel.checkpoint.written_file import WrittenFile, check_coverage, elements_of, tensors_of
from hpcaccel.checkpoint_files import manifest
from hpcaccel.checkpoint_files.contents import OWN_KEYS
from hpcaccel.core.durable_files import atomic_write

__all__ = ["BlockSummary", "FileTable", "write_block", "write_blocks", "write_index"]

FileTable = dict[str, dict[str, Any]]
"""Size and CRC of files, by path in the checkpoint."""
BlockSummary = dict[str, Any]
"""What the rest of the checkpoint needs of a block, as JSON:

- ``name``; ``entry``: size and CRC of its table of files;
- ``files``: number of its ranks that have written one; ``bytes`` and ``linked_bytes``: sizes of all of them together;
- ``tensors``: those that are not in its part of the index, with their chunks in this block;
- ``parts``: of the others, except for the ranks' own: dtype, shape, bounds and number of elements in this block.
"""


def write_blocks(checkpoint: Path, files: Iterable[WrittenFile]) -> list[BlockSummary]:
    """Write the files of all blocks.

    Args:
        files: those of all ranks.
    """
    by_block: defaultdict[str, list[WrittenFile]] = defaultdict(list)
    for file in files:
        by_block[file.file.partition("/")[0]].append(file)
    return [write_block(checkpoint, name, of_block) for name, of_block in sorted(by_block.items())]


def write_block(checkpoint: Path, name: str, files: Iterable[WrittenFile]) -> BlockSummary:
    """Write a block's part of the index, and its table of files. Two processes may do this: they write the same bytes.

    Args:
        files: those of the block's ranks.
    """
    files = sorted(files, key=lambda file: file.file)
    table: FileTable = {}
    for file in files:
        table |= file.table()
    size = sum(int(entry["bytes"]) for entry in table.values())
    part = tensors_of(files, operator.attrgetter("in_block"))
    where = f"{name}/{manifest.INDEX}"
    table[where] = _write(checkpoint / where, {"version": manifest.PARTS_VERSION, "tensors": part})
    beside = {block_name(rank) for file in files for rank in file.others} - {name}
    return {
        "name": name,
        "entry": _write(checkpoint / name / manifest.FILES, {"files": table, "beside": sorted(beside)}),
        "files": len(files),
        "bytes": size + table[where]["bytes"],
        "linked_bytes": sum(file.linked_bytes for file in files),
        "tensors": tensors_of(files, lambda chunk: not chunk.in_block),
        "parts": {
            key: [tensor["dtype"], tensor["shape"], _bounds(tensor["chunks"]), elements_of(tensor["chunks"])]
            for key, tensor in part.items()
            if not key.startswith(OWN_KEYS)
        },
    }


def write_index(checkpoint: Path, blocks: Sequence[BlockSummary], first: Block) -> tuple[FileTable, dict[str, Any]]:
    """Write ``index.json`` and ``ranges.json``.

    Args:
        first: the first block.

    Returns:
        Sizes and CRCs of these two, and the manifest's fields about blocks.

    Raises:
        CheckpointError: the chunks do not cover a tensor.
    """
    tensors: dict[str, Any] = {}
    ranges: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    elements: defaultdict[str, int] = defaultdict(int)
    for block in blocks:
        for key, tensor in block["tensors"].items():
            tensors.setdefault(key, {**tensor, "chunks": []})["chunks"] += tensor["chunks"]
            elements[key] += elements_of(tensor["chunks"])
        for key, (dtype, shape, bounds, count) in block["parts"].items():
            tensors.setdefault(key, {"dtype": dtype, "shape": shape, "chunks": []})
            ranges[key][block["name"]] = bounds
            elements[key] += count
    for key, tensor in tensors.items():
        check_coverage(key, tensor["shape"], elements[key])
    own = {
        manifest.INDEX: _write(checkpoint / manifest.INDEX, {"version": manifest.PARTS_VERSION, "tensors": tensors}),
        manifest.RANGES: _write(checkpoint / manifest.RANGES, {"ranges": ranges}),
    }
    entries = {block["name"]: block["entry"] for block in blocks}
    return own, {"version": manifest.PARTS_VERSION, "blocks": entries, "block_ranks": first.ranks}


def _bounds(chunks: list[Any]) -> list[list[int]]:
    """The smallest box that contains all chunks: begin and end in each dimension."""
    begins = zip(*(chunk["at"] for chunk in chunks), strict=True)
    ends = zip(*([at + size for at, size in zip(c["at"], c["shape"], strict=True)] for c in chunks), strict=True)
    return [[min(begin), max(end)] for begin, end in zip(begins, ends, strict=True)]


def _write(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Write and sync a file. Returns its size and CRC."""
    text = json.dumps(content, separators=(",", ":")).encode()
    atomic_write(path, text)
    return {"bytes": len(text), "crc32": f"{crc32(text):08x}"}
