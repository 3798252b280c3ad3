"""The writers' reports on their files, which rank 0's writer gathers before it commits. Does not import torch.

The ranks of a save that has one block report in the results folder itself, one JSON file each. The ranks of several
blocks (see ``rank_blocks``) report in one subfolder per block. The first writer that finds its subfolder complete
merges the reports into one file in the results folder, so that rank 0's writer reads a file per block. Nobody waits for
a merge: if none appears (a network file system may show two writers each other's reports late), rank 0's writer reads
the subfolder itself.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from hpcaccel.checkpoint.rank_blocks import Block
from hpcaccel.checkpoint.written_file import WrittenFile
from hpcaccel.core.durable_files import DIRECTORY_MODE, FILE_MODE, atomic_write

__all__ = ["deliver", "gather"]

log = logging.getLogger(__name__)

POLL_SECONDS = (0.002, 0.1)
"""First and longest interval at which the results folder is polled; the interval doubles each time."""
MERGE_SECONDS = 2.0
"""Interval at which rank 0's writer reads the subfolders that nobody has merged."""
_REPORT, _MERGED = ".bin.json", ".block.json"
_MERGING = "merging"
"""The mark of the writer that merges the reports of a block."""


def deliver(results: Path, written: WrittenFile, *, block: Block | None) -> None:
    """Report a written file to rank 0's writer process, which calls ``gather``.

    Args:
        block: the block of the rank; None if the save has only one.
    """
    # Only the writers of this save read the report: it must appear atomically, but need not survive a power failure.
    text = json.dumps(vars(written), separators=(",", ":"))
    folder = results if block is None else results / block.name
    if block is not None:
        folder.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    atomic_write(folder / f"{Path(written.file).name}.json", text, sync=False)
    if block is None or len(names := _names(folder, _REPORT)) < block.ranks:
        return
    try:
        os.close(os.open(folder / _MERGING, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE))
        merged = "[" + ",".join((folder / name).read_text() for name in names) + "]"
        atomic_write(results / f"{block.name}{_MERGED}", merged, sync=False)
    except (FileExistsError, FileNotFoundError):
        pass  # another writer merges them, or rank 0 has them already
    except OSError as error:
        log.warning("cannot merge the reports in %s, rank 0 reads them one by one: %s", folder, error)


def gather(results: Path, count: int, check: Callable[[], None]) -> list[WrittenFile]:
    """Wait for ``count`` reports and return them. ``check`` is called between two polls and may end the process."""
    pause, longest = POLL_SECONDS
    blocks: dict[str, list[WrittenFile]] = {}
    next_look = time.monotonic() + MERGE_SECONDS
    while True:
        names = _names(results, _REPORT, _MERGED)
        for name in names:
            if name.endswith(_MERGED) and name not in blocks:
                blocks[name] = [WrittenFile(**fields) for fields in json.loads((results / name).read_bytes())]
        paths = [results / name for name in names if name.endswith(_REPORT)]
        if time.monotonic() > next_look:
            next_look = time.monotonic() + MERGE_SECONDS
            paths += _unmerged(results, blocks)
        if sum(map(len, blocks.values())) + len(paths) == count:
            single = [WrittenFile(**json.loads(path.read_bytes())) for path in paths]
            return sorted([*single, *(one for block in blocks.values() for one in block)], key=lambda one: one.file)
        check()
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _unmerged(results: Path, blocks: dict[str, list[WrittenFile]]) -> list[Path]:
    folders = [entry for entry in os.scandir(results) if entry.is_dir() and f"{entry.name}{_MERGED}" not in blocks]
    return [Path(folder.path) / name for folder in folders for name in _names(Path(folder.path), _REPORT)]


def _names(folder: Path, *endings: str) -> list[str]:
    # List the folder: NFS may serve the lookup of a single name from its cache, but reads listings from the server.
    return sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(endings))
