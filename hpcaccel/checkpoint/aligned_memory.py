"""New host memory for large tensors, into which direct I/O reads without a buffer in between."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hpcaccel.checkpoint.manifest_writer import Index
from hpcaccel.checkpoint.shard_files import BLOCK_BYTES
from hpcaccel.checkpoint.stored_file import huge_pages

__all__ = ["empty_aligned"]

LEAST_BYTES = 8 << 20
"""Smaller tensors are allocated as usual."""


def empty_aligned(like: torch.Tensor, key: str, index: Index) -> torch.Tensor:
    """An uninitialised tensor for a stored one, with its dtype and the shape, device and sharding of ``like``. A large
    one on the CPU lies in huge pages, and its address has the alignment of its bytes in the file."""
    dtype = index.tensor(key).properties.dtype
    local = like.to_local() if isinstance(like, DTensor) else like
    size = local.numel() * dtype.itemsize
    if local.device.type != "cpu" or size < LEAST_BYTES or not local.is_contiguous():
        return torch.empty_like(like, dtype=dtype)
    offset = (0,) * like.ndim
    if isinstance(like, DTensor):
        _, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    piece = index.pieces.get(MetadataIndex(key, torch.Size(offset)))
    remainder = 0 if piece is None else piece.offset % BLOCK_BYTES
    memory = torch.frombuffer(huge_pages(size, remainder=remainder), dtype=dtype).reshape(local.shape)
    if not isinstance(like, DTensor):
        return memory
    return DTensor.from_local(
        memory, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
