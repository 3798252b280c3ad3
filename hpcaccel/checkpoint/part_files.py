"""The two files in shared memory that hold the newest parts of one rank: one is complete while the other is written."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.checkpoint import snapshot_parts
from hpcaccel.checkpoint.snapshot_memory import SnapshotMemory
from hpcaccel.checkpoint.snapshot_parts import SnapshotKey, SnapshotRecord
from hpcaccel.errors import CheckpointError

__all__ = ["COPIES", "PartFile", "PartFiles"]

COPIES = 2
"""Number of files per rank."""
SLACK, SLACK_BYTES = 100, 64 << 10
"""A file is larger than its first part, by one ``SLACK``-th and ``SLACK_BYTES``."""


@dataclass
class PartFile:
    """One of the two files.

    Args:
        path: where it lies while it is not published.
        key: the snapshot that it is part of; None while it is not published.
    """

    path: Path
    memory: SnapshotMemory
    key: SnapshotKey | None = None


class PartFiles:
    """The files of one rank's parts in a node's folder.

    Args:
        name: beginning of the files' names while they are not published; no other object uses it.
    """

    def __init__(self, folder: Path, name: str, *, rank: int) -> None:
        self._folder = folder
        self._name = name
        self._rank = rank
        self._files: list[PartFile] = []

    @property
    def count(self) -> int:
        return len(self._files)

    @property
    def keys(self) -> set[SnapshotKey]:
        """The snapshots of which these files are parts."""
        return {file.key for file in self._files if file.key is not None}

    def of(self, key: SnapshotKey) -> PartFile:
        return next(file for file in self._files if file.key == key)

    def free(self, size: int) -> PartFile:
        """The file of the older part, withdrawn and large enough for ``size`` bytes.

        Raises:
            CheckpointError: the memory cannot be allocated.
        """
        if len(self._files) < COPIES:
            path = self._folder / f"{self._name}.{len(self._files)}"
            self._files.append(PartFile(path, _allocate(size, path)))
            return self._files[-1]
        file = min(self._files, key=lambda file: file.key or (0, 0, 0))
        self._withdraw(file)
        if file.memory.size < size:
            file.memory = _allocate(size, file.path)
        return file

    def publish(self, file: PartFile, key: SnapshotKey, record: SnapshotRecord) -> None:
        """Make ``file`` a part of a snapshot."""
        snapshot_parts.publish(self._folder, key, record, file.path)
        file.key = key

    def remove(self) -> None:
        """Delete the files."""
        for file in self._files:
            with contextlib.suppress(FileNotFoundError):
                self._withdraw(file)
            file.path.unlink(missing_ok=True)
        self._files.clear()

    def _withdraw(self, file: PartFile) -> None:
        if file.key is not None:
            snapshot_parts.withdraw(self._folder, file.key, self._rank, file.path)
            file.key = None


def _allocate(size: int, path: Path) -> SnapshotMemory:
    """Memory for ``size`` bytes, and for values whose text is longer in the next snapshot."""
    path.unlink(missing_ok=True)
    try:
        return SnapshotMemory(size + size // SLACK + SLACK_BYTES, path)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise CheckpointError(f"cannot allocate {size:,} bytes in {path}: {error.strerror or error}") from None
