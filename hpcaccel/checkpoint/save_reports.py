"""The writers' reports on their files, which rank 0's writer gathers before it commits. Does not import torch.

The ranks of a save that has one block report in the results folder itself, one JSON file each. The ranks of several
blocks (see ``rank_blocks``) report in one subfolder per block. The first writer that finds its subfolder complete
writes the block's part of the index (``block_files``) and a summary in the results folder, so that rank 0's writer
reads a small file per block. Nobody depends on this writer: if no summary appears (a network file system may show two
writers each other's reports late, or the writer is killed), rank 0's writer does the same.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from hpcaccel.checkpoint.block_files import BlockSummary, write_block
from hpcaccel.checkpoint.rank_blocks import Block
from hpcaccel.checkpoint.written_file import WrittenFile
from hpcaccel.checkpoint_files import SavePaths
from hpcaccel.core.durable_files import DIRECTORY_MODE, FILE_MODE, atomic_write

__all__ = ["deliver", "gather", "gather_blocks"]

log = logging.getLogger(__name__)

POLL_SECONDS = (0.002, 0.1)
"""First and longest interval at which the results folder is polled; the interval doubles each time."""
MERGE_SECONDS = 2.0
"""Interval at which rank 0's writer reads the subfolders that nobody has merged."""
MERGING_SECONDS = 60.0
"""How long rank 0's writer leaves a subfolder to the writer that has begun to merge it."""
_REPORT, _MERGED = ".bin.json", ".block.json"
_MERGING = "merging"
"""The mark of the writer that merges the reports of a block."""


def deliver(paths: SavePaths, written: WrittenFile, *, block: Block | None) -> None:
    """Report a written file to rank 0's writer process, which calls ``gather`` or ``gather_blocks``.

    Args:
        block: the block of the rank; None if the save has only one.
    """
    # Only the writers of this save read the report: it must appear atomically, but need not survive a power failure.
    text = json.dumps(vars(written), separators=(",", ":"))
    folder = paths.results if block is None else paths.results / block.name
    if block is not None:
        folder.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    atomic_write(folder / f"{Path(written.file).name}.json", text, sync=False)
    if block is None or len(names := _names(folder, _REPORT)) < block.ranks:
        return
    try:
        os.close(os.open(folder / _MERGING, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE))
        summary = write_block(paths.temporary, block.name, _read(folder / name for name in names))
        text = json.dumps(summary, separators=(",", ":"))
        atomic_write(paths.results / f"{block.name}{_MERGED}", text, sync=False)
    except (FileExistsError, FileNotFoundError):
        pass  # another writer merges them, or rank 0 has them already
    except OSError as error:
        log.warning("cannot merge the reports in %s, rank 0 reads them one by one: %s", folder, error)
        with suppress(OSError):  # rank 0 then does so some time later
            (folder / _MERGING).unlink()


def gather(paths: SavePaths, count: int, check: Callable[[], None]) -> list[WrittenFile]:
    """Wait for ``count`` reports of the one block, and return them. ``check`` is called between two polls and may end
    the process."""
    for _ in _polls(check):
        if len(names := _names(paths.results, _REPORT)) == count:
            return _read(paths.results / name for name in names)
    raise AssertionError


def gather_blocks(paths: SavePaths, count: int, check: Callable[[], None]) -> list[BlockSummary]:
    """Wait for ``count`` reports of several blocks. Returns the summaries of the blocks."""
    found: dict[str, BlockSummary] = {}
    marked: dict[str, float] = {}
    next_look = time.monotonic() + MERGE_SECONDS
    for now in _polls(check):
        for name in _names(paths.results, _MERGED):
            if name not in found:
                found[name] = json.loads((paths.results / name).read_bytes())
        left: dict[str, list[Path]] = {}
        if now > next_look:
            next_look = now + MERGE_SECONDS
            left = _unmerged(paths.results, found, marked, now)
        if sum(block["files"] for block in found.values()) + sum(map(len, left.values())) == count:
            for name, reports in left.items():
                found[name] = write_block(paths.temporary, name.removesuffix(_MERGED), _read(reports))
            return [found[name] for name in sorted(found)]
    raise AssertionError


def _polls(check: Callable[[], None]) -> Iterable[float]:
    """Yield the time (``time.monotonic``) at each poll."""
    pause, longest = POLL_SECONDS
    while True:
        yield time.monotonic()
        check()
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _unmerged(
    results: Path, found: dict[str, BlockSummary], marked: dict[str, float], now: float
) -> dict[str, list[Path]]:
    """The reports of the blocks without a summary that no writer is merging, by the summary's name.

    Args:
        marked: when the mark of each merge was seen first; is added to.
    """
    reports = {}
    for entry in os.scandir(results):
        name = f"{entry.name}{_MERGED}"
        if not entry.is_dir() or name in found:
            continue
        folder = Path(entry.path)
        if not _names(folder, _MERGING) or now >= marked.setdefault(name, now) + MERGING_SECONDS:
            reports[name] = [folder / report for report in _names(folder, _REPORT)]
    return reports


def _read(reports: Iterable[Path]) -> list[WrittenFile]:
    return [WrittenFile(**json.loads(report.read_bytes())) for report in reports]


def _names(folder: Path, *endings: str) -> list[str]:
    # List the folder: NFS may serve the lookup of a single name from its cache, but reads listings from the server.
    return sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(endings))
