"""The content of a checkpoint's two JSON files, in terms of torch's types.

``index.json`` describes each tensor: dtype, shape and its chunks, each with file, offset, length and CRC. The manifest
``COMMITTED`` (read and checked by ``hpcaccel.checkpoint_files.manifest``) describes the save, and lists the sizes and
CRCs of the ranks' files and of the index. The manifest is small, because status commands read it often. It contains the
CRC of its own canonical JSON.
"""

from __future__ import annotations

import json
import platform
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
from hpcaccel.checkpoint.tree import dtype_of
from hpcaccel.checkpoint_files.manifest import VERSION
from hpcaccel.errors import CheckpointError

__all__ = ["Index", "Piece", "describe", "processor"]


@dataclass(frozen=True)
class Piece:
    """Location of one chunk of a tensor: ``stored`` bytes from ``offset``, of which the first ``length`` are data."""

    file: str
    offset: int
    length: int
    stored: int
    crc32: int
    """CRC of all stored bytes, including padding, so that every byte of a file is covered."""


@dataclass(frozen=True)
class Index:
    """The tensors of a checkpoint: DCP's metadata, and the location of every chunk."""

    metadata: Metadata
    pieces: dict[MetadataIndex, Piece]

    def tensor(self, key: str) -> TensorStorageMetadata:
        """Dtype, shape and chunks of a tensor.

        Raises:
            CheckpointError: the checkpoint has no such tensor.
        """
        found = self.metadata.state_dict_metadata.get(key)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(f"the checkpoint does not contain {key}")
        return found

    def __contains__(self, key: str) -> bool:
        return key in self.metadata.state_dict_metadata

    def files_of(self, key: str) -> set[str]:
        """The files that contain a tensor; an empty set if the checkpoint has no such tensor."""
        chunks = self.tensor(key).chunks if key in self else []
        return {self.pieces[MetadataIndex(key, chunk.offsets)].file for chunk in chunks}

    def add(self, part: bytes) -> None:
        """Add the tensors and chunks of a part of the index."""
        more = Index.from_json(part)
        for key, tensor in more.metadata.state_dict_metadata.items():
            known = self.metadata.state_dict_metadata.setdefault(key, tensor)
            if known is not tensor:
                assert isinstance(known, TensorStorageMetadata)
                assert isinstance(tensor, TensorStorageMetadata)
                known.chunks.extend(tensor.chunks)
        self.pieces.update(more.pieces)

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


def describe(**facts: Any) -> dict[str, Any]:
    """The content of a manifest, except what ``commit.write_manifest`` adds: time, sizes and files.

    Args:
        facts: the save's step, epoch, reason, world size and so on.
    """
    return {
        "version": VERSION,
        "format": "hpcaccel",
        **facts,
        "hpcaccel": hpcaccel.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
    }


@lru_cache(maxsize=1)
def processor() -> str:
    """The name of the GPU or other accelerator, else of the CPU. A bit-exact resume needs the same processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        module: Any = torch.get_device_module(device)
        return str(module.get_device_name()) if hasattr(module, "get_device_name") else device.type
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
