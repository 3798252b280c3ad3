"""What a rank's writer reports of its file: size, CRCs, and where each chunk lies; the index of all files. Does not
import torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from hpcaccel.checkpoint_files import manifest
from hpcaccel.errors import CheckpointError

__all__ = ["PlannedChunk", "WrittenFile", "check_coverage", "elements_of", "index_of", "index_text", "tensors_of"]


class PlannedChunk(NamedTuple):
    """A chunk of a tensor in a rank's file. Its JSON is a list.

    Args:
        key: the tensor's.
        dtype: the tensor's; also ``size``, its shape.
        at: where in the tensor the chunk begins.
        shape: the chunk's.
        length: size in bytes, without padding.
        in_block: whether the index has it in the part of its rank's block, if there are several blocks: it is a rank's
            own, or the tensor has more chunks than a block has ranks.
    """

    key: str
    dtype: str
    size: Sequence[int]
    at: Sequence[int]
    shape: Sequence[int]
    length: int
    in_block: bool = False


@dataclass(frozen=True)
class WrittenFile:
    """A written file: its name, size in bytes and CRC32, and CRC32 and length in bytes of each piece, front to back.

    Args:
        offsets: where each piece lies in its file; None if they lie one behind the other.
        base: name, size and CRC32 of a file that an earlier checkpoint shares, and the numbers of the pieces in it;
            None if all pieces are in ``file``.
        chunks: what each piece is, see ``PlannedChunk``; empty for a file without tensors.
        others: see ``AgreedPlan``.
    """

    file: str
    bytes: int
    crc32: int
    pieces: list[int]
    lengths: list[int]
    offsets: list[int] | None = None
    base: dict[str, Any] | None = None
    chunks: list[Any] = field(default_factory=list)
    others: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        file: str,
        pieces: list[int],
        lengths: list[int],
        chunks: Sequence[Any] = (),
        others: Sequence[int] = (),
    ) -> WrittenFile:
        crc = manifest.combined_crc(zip(pieces, lengths, strict=True))
        return cls(file, sum(lengths), crc, pieces, lengths, chunks=list(chunks), others=list(others))

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


def index_of(files: Iterable[WrittenFile]) -> bytes:
    """The content of ``index.json``: dtype and shape of each tensor, and its chunks with places and CRCs.

    Raises:
        CheckpointError: the chunks do not cover a tensor.
    """
    tensors = tensors_of(files)
    for key, tensor in tensors.items():
        check_coverage(key, tensor["shape"], elements_of(tensor["chunks"]))
    return index_text(tensors)


def index_text(tensors: Mapping[str, Any]) -> bytes:
    """An index as JSON. ``tensors``: see ``tensors_of``."""
    return json.dumps({"version": manifest.VERSION, "tensors": tensors}, separators=(",", ":")).encode()


def tensors_of(
    files: Iterable[WrittenFile], wanted: Callable[[PlannedChunk], bool] = lambda chunk: True
) -> dict[str, Any]:
    """The tensors of an index by key, with those chunks that are ``wanted``."""
    tensors: dict[str, Any] = {}
    for written in files:
        if not written.chunks:
            continue
        rows = zip(written.chunks, written.lengths, written.pieces, written.places(), strict=True)
        for values, stored, crc, (file, offset) in rows:
            chunk = PlannedChunk._make(values)
            if not wanted(chunk):
                continue
            tensor = tensors.setdefault(chunk.key, {"dtype": chunk.dtype, "shape": chunk.size, "chunks": []})
            place = {"file": file, "offset": offset, "length": chunk.length, "stored": stored, "crc32": f"{crc:08x}"}
            tensor["chunks"].append({"at": chunk.at, "shape": chunk.shape, **place})
    return tensors


def elements_of(chunks: Iterable[Mapping[str, Any]]) -> int:
    """Number of elements of chunks of an index."""
    return sum(math.prod(chunk["shape"]) for chunk in chunks)


def check_coverage(key: str, shape: Iterable[int], elements: int) -> None:
    """Raises: CheckpointError: a tensor has another number of elements."""
    if elements != (wanted := math.prod(shape)):
        raise CheckpointError(f"{elements} of the {wanted} elements of {key} were written")
