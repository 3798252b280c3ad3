"""Files in the format of another library that are part of a checkpoint, such as those of DeepSpeed's engine.

The library writes them before the checkpoint's own files, into a directory whose content ``commit.adopt`` moves into
the checkpoint. The manifest lists them under ``attached``, and their sizes and CRCs together with those of all files.
They are therefore committed with the checkpoint, and none of them is read by the library unless its CRC is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.shard_files import crc32
from hpcaccel.checkpoint.written_file import WrittenFile
from hpcaccel.errors import CheckpointError, Damaged

__all__ = ["AttachedFiles", "check_attached", "write_attached"]

CHUNK_BYTES = 1 << 24
"""Number of bytes that are read at once to compute a CRC."""


class AttachedFiles(Protocol):
    """Writes and reads a library's files. All methods but ``check`` are called on all ranks together."""

    def save(self, directory: Path) -> Iterable[Path]:
        """Write the files into ``directory``, which exists. Returns the paths of the files that this rank wrote."""
        ...

    def refuse(self, content: Mapping[str, Any]) -> None:
        """Raise CheckpointError if this training cannot load a checkpoint with the manifest ``content``."""
        ...

    def check(self, path: Path) -> None:
        """Raise CheckpointError if the library must not read this file. Called on one rank, before any is read."""
        ...

    def load(self, directory: Path) -> None:
        """Restore the library's state from the checkpoint ``directory``."""
        ...


def write_attached(ranks: CheckpointRanks, what: str, files: AttachedFiles, directory: Path) -> list[WrittenFile]:
    """Let the library write its files, and compute their CRCs, each on the rank that wrote it.

    Args:
        what: the beginning of error messages.

    Raises:
        CheckpointError: on all ranks, if anything failed on any of them.
    """

    def write() -> list[WrittenFile]:
        return [_written(path, path.relative_to(directory).as_posix()) for path in files.save(directory)]

    return ranks.reduce(what, write, lambda found: [file for of_rank in found for file in of_rank])


def check_attached(
    ranks: CheckpointRanks, what: str, files: AttachedFiles | None, path: Path, content: Mapping[str, Any]
) -> None:
    """Check that this training can load the attached files of the checkpoint ``path``, and that their CRCs are right.
    Each file is read by one rank.

    Args:
        files: None if this training has none.
        content: the checkpoint's manifest.

    Raises:
        Damaged: on all ranks, if a file differs from the committed one.
        CheckpointError: on all ranks, if this training cannot load the checkpoint.
    """
    names = sorted(content.get("attached", ()))
    if files is None:
        if names:
            strategy = (content.get("mesh") or {}).get("strategy")
            raise CheckpointError(
                f"{path} contains the weights in the format of another library (strategy: {strategy}), which only a "
                f"training with strategy={strategy!r} can load"
            )
        return
    files.refuse(content)

    def check() -> None:
        for name in names[ranks.rank :: ranks.world_size]:
            if f"{_crc(path / name):08x}" != content["files"][name]["crc32"]:
                raise Damaged(f"{path / name} is damaged: its CRC differs from the committed CRC")
            files.check(path / name)

    ranks.run(what, check)


def _written(path: Path, name: str) -> WrittenFile:
    return WrittenFile.of(name, [_crc(path)], [path.stat().st_size])


def _crc(path: Path) -> int:
    found = 0
    try:
        with path.open("rb") as file:
            while piece := file.read(CHUNK_BYTES):
                found = crc32(piece, found)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    return found
