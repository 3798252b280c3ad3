"""The two JSON files of a checkpoint.

``index.json`` says where each tensor lies: dtype, shape and its chunks, each with offset, length and CRC. ``COMMITTED``
(read and checked by ``hpcaccel.checkpoint_files.manifest``) is written last and stays small, because status pages read
it often: what was saved, when, by whom, and the size and CRC of every other file, the index included. Its own CRC is
over its canonical JSON.
"""

from __future__ import annotations

import json
import math
import platform
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import hpcaccel
from hpcaccel.checkpoint.tree import dtype_name, dtype_of
from hpcaccel.checkpoint_files.manifest import INDEX, VERSION, read, read_index, seal
from hpcaccel.errors import CheckpointError

__all__ = ["INDEX", "VERSION", "FileRecord", "Index", "Piece", "build", "processor", "read", "read_index", "seal"]


@dataclass(frozen=True)
class Piece:
    """Where one chunk of a tensor lies: ``stored`` bytes from ``offset`` on, the first ``length`` are the tensor's."""

    file: str
    offset: int
    length: int
    stored: int
    crc32: int
    """Over all stored bytes, so that no byte of a file is without a CRC."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and CRC32 of a whole file."""

    name: str
    bytes: int
    crc32: int


@dataclass(frozen=True)
class Index:
    """What is in a checkpoint and where: DCP's metadata, and the place of every chunk."""

    metadata: Metadata
    pieces: dict[MetadataIndex, Piece]

    def tensor(self, key: str) -> TensorStorageMetadata:
        """Dtype, shape and chunks of a tensor.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """
        found = self.metadata.state_dict_metadata.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"the checkpoint holds no {key}")
        return found

    def __contains__(self, key: str) -> bool:
        return key in self.metadata.state_dict_metadata

    def to_json(self) -> bytes:
        """
        Raises:
            CheckpointError: a chunk was planned and not written, or the chunks do not cover their tensor.
        """
        tensors = {}
        for key, tensor in self.metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            tensors[key] = {
                "dtype": dtype_name(tensor.properties.dtype),
                "shape": list(tensor.size),
                "chunks": [self._chunk_to_json(key, chunk) for chunk in tensor.chunks],
            }
            covered = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            if covered != math.prod(tensor.size):
                raise CheckpointError(
                    f"{key} is not covered: its {math.prod(tensor.size)} elements, {covered} in the chunks that the "
                    "ranks hold together. Do all ranks hold the same model?"
                )
        return json.dumps({"version": VERSION, "tensors": tensors}, separators=(",", ":")).encode()

    def _chunk_to_json(self, key: str, chunk: ChunkStorageMetadata) -> dict[str, Any]:
        piece = self.pieces.get(MetadataIndex(key, chunk.offsets))
        if piece is None:
            raise CheckpointError(f"the chunk of {key} at {list(chunk.offsets)} was not written by any rank")
        return {
            "at": list(chunk.offsets),
            "shape": list(chunk.sizes),
            "file": piece.file,
            "offset": piece.offset,
            "length": piece.length,
            "stored": piece.stored,
            "crc32": f"{piece.crc32:08x}",
        }

    @classmethod
    def from_json(cls, text: bytes) -> Index:
        metadata: dict[str, Any] = {}
        pieces: dict[MetadataIndex, Piece] = {}
        for key, tensor in json.loads(text)["tensors"].items():
            chunks = []
            for chunk in tensor["chunks"]:
                at = torch.Size(chunk["at"])
                chunks.append(ChunkStorageMetadata(offsets=at, sizes=torch.Size(chunk["shape"])))
                pieces[MetadataIndex(key, at)] = Piece(
                    chunk["file"], chunk["offset"], chunk["length"], chunk["stored"], int(chunk["crc32"], 16)
                )
            properties = TensorProperties(dtype=dtype_of(tensor["dtype"]))
            metadata[key] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
        return cls(Metadata(metadata), pieces)


def build(*, files: list[FileRecord], **facts: Any) -> dict[str, Any]:
    """The content of a COMMITTED manifest, but for its own CRC. ``facts`` are what the caller knows of the save."""
    return {
        "version": VERSION,
        "format": "hpcaccel",
        **facts,
        "time": time.time(),
        "hpcaccel": hpcaccel.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "bytes": sum(file.bytes for file in files),
        "files": {file.name: {"bytes": file.bytes, "crc32": f"{file.crc32:08x}"} for file in files},
    }


@lru_cache(maxsize=1)
def processor() -> str:
    """What computed: the GPU's name, or else the CPU's. Bit-exact continuation needs the same one."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
