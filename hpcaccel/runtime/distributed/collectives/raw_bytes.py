"""Tensors of any type as bytes and back: what travels between ranks needs no type that the network library knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["bytes_of", "joined", "tensor_of"]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """(n,) uint8 on the same device; shares memory with the tensor where it can."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def tensor_of(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of this type and shape that ``data``, (n,) uint8, holds; shares its memory where it can."""
    if data.storage_offset() % 16 or not data.is_contiguous():
        data = data.clone(memory_format=torch.contiguous_format)
    return data.view(dtype).reshape(tuple(shape))


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(n,) uint8: the bytes of all of them."""
    parts = [bytes_of(tensor) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
