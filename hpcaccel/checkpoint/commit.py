"""The commit protocol: a checkpoint is complete on the disk, or it does not exist. Does not import torch.

Every save has five phases, whether training waits for it or a process writes it in the background.

1. **begin** Rank 0 creates the temporary directory ``.step_00001200.<attempt>.tmp``. A save in the background, or
   of several blocks of ranks, also gets a results folder, ``.step_00001200.<attempt>.results.tmp``.
2. **write** Each rank writes its tensors to one file in the temporary directory (``rank_00003.bin``) and fsyncs it.
   The files of many ranks lie in one folder per block of ranks (``rank_blocks``).
   A background save may link a file of the checkpoint before and write only what has changed (``unchanged_bytes``).
3. **gather** Rank 0 collects the size, CRCs and chunks of each file: over the process group, or from the results
   folder, to which each writer process writes a JSON file (``save_reports``). The ranks of several blocks always
   report in files, and the last of a block writes the block's part of index and manifest first (``block_files``).
4. **publish** Rank 0 writes ``index.json`` (where each tensor is), then ``COMMITTED`` (size and CRC of each file, or of
   each block's table of them), fsyncs, renames the directory to ``step_00001200`` and fsyncs its parent. The rename is
   the commit.
5. **retire** Rank 0 renames checkpoints beyond the retention limit to ``.step_00000800.deleted.tmp`` and deletes them.

========  ================================  ====================================================
phase     the training waits                in the background
========  ================================  ====================================================
begin     rank 0, after all have planned    the same
write     each rank, ``ShardWriter``        snapshot to shared memory; each rank's ``writer`` process
gather    ``CheckpointRanks.reduce``        ``save_reports.deliver`` and ``gather``
publish   rank 0, ``write_manifest`` and    rank 0's writer process, the same two functions
          ``publish``
retire    rank 0; a thread deletes          rank 0's writer process
========  ================================  ====================================================

State on the disk if any process is killed at any time:

- before begin: the older checkpoints; those of an abandoned branch may already be renamed.
- from begin until the rename: a temporary directory, possibly with a manifest. This directory does not count as a
  checkpoint, and ``clean`` removes it before the next save. Older checkpoints are unchanged.
- after the rename: the new checkpoint, complete. A power failure before the parent's fsync may undo the rename.
- during retire: the new checkpoint, and old ones under either name. ``clean`` deletes the renamed ones.

A directory was therefore complete when it got its final name. If its manifest is missing or wrong, it was damaged
later. Ranks of an earlier attempt that are still running (on a node that the scheduler has lost) cannot commit:
``publish`` refuses once a later attempt has begun.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint.block_files import BlockSummary, FileTable, write_blocks, write_index
from hpcaccel.checkpoint.rank_blocks import Block
from hpcaccel.checkpoint.shard_files import crc32
from hpcaccel.checkpoint.written_file import WrittenFile, index_of
from hpcaccel.checkpoint_files import is_pinned, manifest
from hpcaccel.core.durable_files import DIRECTORY_MODE, atomic_write, fsync_directory, make_folder
from hpcaccel.errors import CheckpointError

__all__ = [
    "adopt",
    "begin",
    "clean",
    "delete",
    "has_adopted",
    "publish",
    "retire",
    "write_manifest",
]

log = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"\.step_\d{8,}\..+\.tmp")


# -- begin


def clean(directory: Path) -> None:
    """Remove temporary directories left by killed saves and deletions. A failure to remove one is logged."""
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        if _TEMPORARY.fullmatch(path.name):
            try:
                shutil.rmtree(path)
            except OSError as error:
                log.warning("cannot remove the temporary directory %s: %s", path, error)


def begin(temporary: Path) -> None:
    """Create the directory that a save writes to."""
    make_folder(temporary.parent)
    temporary.mkdir(mode=DIRECTORY_MODE)


# -- publish


def write_manifest(
    temporary: Path,
    *,
    files: Iterable[WrittenFile],
    facts: dict[str, Any],
    block: Block | None = None,
    blocks: Sequence[BlockSummary] | None = None,
) -> int:
    """Write the index and, as the last file, the manifest.

    Args:
        files: the files of the ranks, and of other libraries.
        facts: the other fields of the manifest, see ``manifest_writer.describe``.
        block: rank 0's block; None if the ranks form one block. The index of several is written in parts.
        blocks: the blocks, if their files are written already, so that they are not among ``files``.

    Returns:
        Total size of the files of the ranks and of the index in bytes.

    Raises:
        CheckpointError: the chunks do not cover a tensor.
    """
    files = list(files)
    table: FileTable = {}
    if block is not None and blocks is None:
        blocks = write_blocks(temporary, [file for file in files if file.chunks])
        files = [file for file in files if not file.chunks]
    for file in files:
        table |= file.table()
    fields: dict[str, Any] = {}
    if block is None or blocks is None:
        index = index_of(files)
        atomic_write(temporary / manifest.INDEX, index)
        table |= WrittenFile.of(manifest.INDEX, [crc32(index)], [len(index)]).table()
    else:
        own, fields = write_index(temporary, blocks, block)
        table |= own
    size = sum(int(entry["bytes"]) for entry in [*table.values(), *(blocks or ())])
    content = {**facts, **fields, "time": time.time(), "bytes": size, "files": table}
    atomic_write(temporary / checkpoint_files.MANIFEST, manifest.seal(content))
    return size


def adopt(extra: Path, temporary: Path) -> None:
    """Move the files in ``extra`` into a checkpoint that is about to be committed, and fsync them.

    Raises:
        CheckpointError: a file has the same name as one of the checkpoint's own files.
    """
    for path in sorted(extra.iterdir()):
        target = temporary / path.name
        if target.exists():
            raise CheckpointError(
                f"{path.name!r} is a reserved file name in checkpoints: choose another name for your file"
            )
        for entry in [path, *path.rglob("*")]:
            if entry.is_dir():
                fsync_directory(entry)
            elif entry.is_file():
                with entry.open("rb") as opened:
                    os.fsync(opened.fileno())
        os.rename(path, target)
    extra.rmdir()


def has_adopted(path: Path) -> bool:
    """Whether a checkpoint contains files from ``adopt``."""
    content = checkpoint_files.read_manifest(path) or {}
    written = [*content.get("files", ()), *content.get("blocks", ())]
    own = {checkpoint_files.MANIFEST, checkpoint_files.PINNED, *(name.partition("/")[0] for name in written)}
    return any(entry.name not in own for entry in path.iterdir())


def publish(temporary: Path, final: Path) -> None:
    """Commit: rename ``temporary`` to ``final``, with an fsync before and after.

    Raises:
        CheckpointError: ``final`` exists, or a later attempt of the run has begun.
    """
    _refuse_earlier_attempt(temporary, final)
    if final.exists():  # rename() would replace an empty directory
        raise CheckpointError(f"{final} already exists; a committed checkpoint is never overwritten")
    fsync_directory(temporary)
    os.rename(temporary, final)
    try:
        fsync_directory(final.parent)
    except OSError:
        os.rename(final, temporary)  # undo the rename, which may not survive a power failure
        raise


def _refuse_earlier_attempt(temporary: Path, final: Path) -> None:
    attempt = checkpoint_files.attempt_of(temporary.name)
    attempts = final.parent.parent / "attempts"
    if attempt is None or final.parent.name != "checkpoints" or not attempts.is_dir():
        return
    # List the folder: NFS may serve the lookup of a single name from its cache.
    newest = max((int(name) for name in os.listdir(attempts) if name.isdigit()), default=0)
    if newest > attempt:
        raise CheckpointError(
            f"attempt {newest} of this run has started: attempt {attempt} can no longer save checkpoints"
        )


# -- retire


def retire(directory: Path, *, keep: int, newest_step: int, keep_every: int | None = None) -> list[Path]:
    """Rename checkpoints beyond the retention limit to temporary names.

    The newest ``keep`` good checkpoints up to ``newest_step`` are kept, as are pinned checkpoints and the first good
    one at or after each positive multiple of ``keep_every``. A checkpoint is good if its manifest and file sizes are
    correct. Checkpoints after ``newest_step`` belong to another branch and are kept too. Errors are only logged: the
    new checkpoint is committed, and training continues.

    Returns:
        The renamed directories, for ``delete``.
    """
    doomed = []
    try:
        newest_first = [
            (step, path) for step, path in checkpoint_files.step_directories(directory) if step <= newest_step
        ]
        for step, path in _too_old(newest_first, keep):
            if not is_pinned(path) and not _is_milestone(step, newest_first, keep_every):
                aside = path.with_name(checkpoint_files.temporary_name(step, "deleted"))
                os.rename(path, aside)
                doomed.append(aside)
    except OSError as error:
        log.warning("cannot delete old checkpoints in %s: %s", directory, error)
    return doomed


def delete(doomed: list[Path]) -> None:
    """Delete the directories returned by ``retire``. A failure is logged."""
    for path in doomed:
        try:
            shutil.rmtree(path)
        except OSError as error:
            log.warning("cannot delete old checkpoint %s: %s", path, error)


def _too_old(newest_first: list[tuple[int, Path]], keep: int) -> list[tuple[int, Path]]:
    """Checkpoints older than the newest ``keep`` good ones, oldest first."""
    good = 0
    for position, (_, path) in enumerate(newest_first):
        if good >= keep:
            return newest_first[: position - 1 : -1]
        good += _is_good(path)
    return []


def _is_milestone(step: int, newest_first: list[tuple[int, Path]], keep_every: int | None) -> bool:
    """Whether ``step`` has the first good checkpoint at or after the last positive multiple of ``keep_every``."""
    if keep_every is None or step < keep_every:
        return False
    begin = step - step % keep_every
    return not any(begin <= other < step and _is_good(earlier) for other, earlier in newest_first)


def _is_good(path: Path) -> bool:
    try:
        manifest.read(path)
    except CheckpointError as error:
        log.warning("checkpoint %s is not counted for retention: %s", path.name, error)
        return False
    return True
