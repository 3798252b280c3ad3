"""What a rank's writer reports of its file: size, CRCs, and where each chunk lies. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hpcaccel.checkpoint_files import manifest

__all__ = ["WrittenFile", "complete_index"]


@dataclass(frozen=True)
class WrittenFile:
    """A written file: its name, size in bytes and CRC32, and CRC32 and length in bytes of each piece, front to back.

    Args:
        offsets: where each piece lies in its file; None if they lie one behind the other.
        base: name, size and CRC32 of a file that an earlier checkpoint shares, and the numbers of the pieces in it;
            None if all pieces are in ``file``.
    """

    file: str
    bytes: int
    crc32: int
    pieces: list[int]
    lengths: list[int]
    offsets: list[int] | None = None
    base: dict[str, Any] | None = None

    @classmethod
    def of(cls, file: str, pieces: list[int], lengths: list[int]) -> WrittenFile:
        return cls(file, sum(lengths), manifest.combined_crc(zip(pieces, lengths, strict=True)), pieces, lengths)

    @property
    def linked_bytes(self) -> int:
        """Size of the shared file."""
        return 0 if self.base is None else int(self.base["bytes"])

    def places(self) -> list[tuple[str, int]]:
        """File and offset of each piece."""
        offsets = list(accumulate(self.lengths, initial=0))[:-1] if self.offsets is None else self.offsets
        in_base = set() if self.base is None else set(self.base["pieces"])
        name = "" if self.base is None else self.base["file"]
        return [(name if number in in_base else self.file, offset) for number, offset in enumerate(offsets)]

    def table(self) -> dict[str, dict[str, Any]]:
        """What the manifest lists."""
        found = {self.file: {"bytes": self.bytes, "crc32": f"{self.crc32:08x}"}}
        if self.base is not None:
            found[self.base["file"]] = {"bytes": self.base["bytes"], "crc32": f"{self.base['crc32']:08x}"}
        return found


def complete_index(index: bytes, files: Iterable[WrittenFile]) -> bytes:
    """Set CRC and place of every chunk in an index that was created before the files were written: with zeros as CRCs,
    and with the chunks of a rank one behind the other in its file."""
    found: dict[tuple[str, int], tuple[str, int, int]] = {}
    rearranged = set()
    for written in files:
        if written.offsets is not None:
            rearranged.add(written.file)
        planned = 0
        for crc, length, place in zip(written.pieces, written.lengths, written.places(), strict=True):
            if length:  # an empty chunk has the same offset as the next one, and no bytes to check
                found[written.file, planned] = (*place, crc)
            planned += length
    content = json.loads(index)
    for tensor in content["tensors"].values():
        for chunk in tensor["chunks"]:
            file, offset, crc = chunk["file"], chunk["offset"], 0
            if chunk["stored"]:
                file, offset, crc = found[file, offset]
            elif file in rearranged:
                offset = 0
            chunk |= {"file": file, "offset": offset, "crc32": f"{crc:08x}"}
    return json.dumps(content, separators=(",", ":")).encode()
