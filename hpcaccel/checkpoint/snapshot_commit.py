"""A snapshot in memory becomes a checkpoint on the disk, for stops that leave too little time for a fresh save."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from hpcaccel.checkpoint import commit, snapshot_parts
from hpcaccel.checkpoint.node_snapshots import NodeSnapshots
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.rank_blocks import block_of, make_block_folder
from hpcaccel.checkpoint.saving import Branch, remove_unfinished
from hpcaccel.checkpoint.shard_files import ShardFile, up_to_block
from hpcaccel.checkpoint.snapshot_memory import SnapshotMemory
from hpcaccel.checkpoint.snapshot_parts import SnapshotRecord
from hpcaccel.checkpoint_files import SavePaths
from hpcaccel.errors import CheckpointError

__all__ = ["write_snapshot"]

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Number of bytes after which the clock is read again."""
MARGIN_SECONDS = 1.0
"""Time before the deadline that is left for the end of the program."""


def write_snapshot(
    ranks: CheckpointRanks,
    snapshots: NodeSnapshots,
    branch: Branch,
    directory: Path,
    attempt: int | str,
    *,
    reason: str,
    deadline: float | None,
) -> tuple[SavePaths, int] | None:
    """Write the newest snapshot of this attempt as ``save`` writes a checkpoint: files, manifest, rename. Collective.

    Args:
        reason: why the checkpoint is saved, for display.
        deadline: when the processes will be killed (seconds since the epoch); None if unknown.

    Returns:
        The checkpoint's paths, and on rank 0 its size in bytes; None if there is no snapshot, if its step is committed
        already, or if the time was too short, which is logged.
    """
    key = snapshots.agree()
    if key is None:
        return None
    paths = SavePaths(directory, key.step, attempt)
    what = f"the snapshot of step {key.step} in memory cannot be written to the disk"

    def write() -> SnapshotRecord:
        record, memory = snapshots.part(key)
        if record.written.bytes:
            make_block_folder(paths.temporary, record.written.file)
            _write(paths.temporary / record.written.file, memory, record.written.bytes, deadline)
        return record

    def publish(records: list[SnapshotRecord]) -> int:
        facts = {**snapshot_parts.facts_of(records), "reason": reason}
        files = [record.written for record in records if record.written.bytes]
        block = block_of(0, ranks.world_size)
        size = commit.write_manifest(paths.temporary, files=files, facts=facts, block=block)
        commit.publish(paths.temporary, paths.final)
        return size

    try:
        if ranks.first(what, lambda: branch.make_way(paths, alone=False)):
            return None
        ranks.first(what, lambda: commit.begin(paths.temporary))
        return paths, ranks.reduce(what, write, publish)
    except CheckpointError as error:  # on all ranks
        if ranks.is_first:
            log.warning("%s", error)
            remove_unfinished(paths)
        return None


def _write(path: Path, memory: SnapshotMemory, size: int, deadline: float | None) -> None:
    file = ShardFile(path)
    try:
        whole = up_to_block(size)
        for start in range(0, whole, PIECE_BYTES):
            if deadline is not None and time.time() > deadline - MARGIN_SECONDS:
                raise CheckpointError(f"the time was too short: {start:,} of {size:,} bytes were written")
            file.write(memory.view[start : min(start + PIECE_BYTES, whole)], start)
        file.finish(size)
    finally:
        file.close()
