"""The commit of a background save, by rank 0's writer: no training thread waits for it, and it needs no torch.

What the ranks will write, and where, is known when they have planned: rank 0 hands its writer the index without its
CRCs and the manifest without its files. Each rank's writer puts the CRCs of its file into a folder beside the
checkpoint once that file is on the disk. When all are there nothing is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import commit
from hpcaccel.checkpoint.crc import combined_crc, crc32
from hpcaccel.checkpoint_files import manifest
from hpcaccel.core.run_dir import atomic_write

__all__ = ["deliver", "gathered", "publish"]

POLL_SECONDS = (0.002, 0.1)
"""How long to wait between two looks for the others: at first, and at most."""


def deliver(results: Path, file: str, *, crcs: list[int], lengths: list[int]) -> None:
    """Say that ``file`` is on the disk, with the CRC of each of its pieces, front to back."""
    told = {
        "file": file,
        "bytes": sum(lengths),
        "crc32": combined_crc(zip(crcs, lengths, strict=True)),
        "pieces": crcs,
        "lengths": lengths,
    }
    # Its content matters to the job that runs now, so it need not be durable: only whole.
    atomic_write(results / f"{file}.json", json.dumps(told, separators=(",", ":")), sync=False)


def gathered(results: Path, count: int, go_on: Callable[[], None]) -> list[dict[str, Any]]:
    """What all ``count`` files' writers have delivered. ``go_on`` is called while they are waited for."""
    wait, longest = POLL_SECONDS
    while True:
        # Opening a directory makes NFS look again; asking for a name would answer from memory that it is not there.
        names = sorted(entry.name for entry in os.scandir(results) if entry.name.endswith(".bin.json"))
        if len(names) == count:
            return [json.loads((results / name).read_bytes()) for name in names]
        go_on()
        time.sleep(wait)
        wait = min(2 * wait, longest)


def publish(
    told: list[dict[str, Any]], *, temporary: Path, final: Path, results: Path, index: bytes, facts: dict[str, Any]
) -> int:
    """Write index and manifest and rename the directory; the bytes of the whole checkpoint.

    Args:
        index: as ``Index.to_json`` has it, every CRC zero.
        facts: the manifest but for its files.

    Raises:
        CheckpointError: there is a checkpoint of that name already.
    """
    text = _complete(json.loads(index), told)
    atomic_write(temporary / manifest.INDEX, text)
    files = {item["file"]: {"bytes": item["bytes"], "crc32": f"{item['crc32']:08x}"} for item in told}
    files[manifest.INDEX] = {"bytes": len(text), "crc32": f"{crc32(text):08x}"}
    size = sum(int(file["bytes"]) for file in files.values())
    content = {**facts, "time": time.time(), "bytes": size, "files": files}
    atomic_write(temporary / checkpoint_files.MANIFEST, manifest.seal(content))
    commit.publish(temporary, final)
    shutil.rmtree(results, ignore_errors=True)  # what stays is removed before the next save
    return size


def _complete(index: dict[str, Any], told: list[dict[str, Any]]) -> bytes:
    """The index with the CRC of every chunk."""
    crcs: dict[tuple[str, int], int] = {}
    for item in told:
        offset = 0
        for crc, length in zip(item["pieces"], item["lengths"], strict=True):
            if length:  # an empty chunk lies where the next one does, and has no bytes to check
                crcs[item["file"], offset] = crc
            offset += length
    for tensor in index["tensors"].values():
        for chunk in tensor["chunks"]:
            crc = crcs[chunk["file"], chunk["offset"]] if chunk["stored"] else 0
            chunk["crc32"] = f"{crc:08x}"
    return json.dumps(index, separators=(",", ":")).encode()
