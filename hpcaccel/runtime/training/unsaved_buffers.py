"""Buffers of models that no checkpoint holds, because they were registered with ``persistent=False``.

A new process makes them anew, which does no harm to those that stay as they were made: masks, tables of positions. So
they are compared with what they were at the beginning.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["UnsavedBuffers"]


class UnsavedBuffers:
    """Those of the prepared models, each with its digest at the first look."""

    def __init__(self) -> None:
        self._first: dict[str, str | None] | None = None

    @property
    def any(self) -> bool:
        return bool(self._first)

    def changed(self, models: Sequence[nn.Module]) -> list[str]:
        """The names of those that differ from the first look, are there only since then, or cannot be compared."""
        now = {name: _digest(buffer) for name, buffer in _unsaved(models)}
        if self._first is None:
            self._first = now
        return [name for name, digest in now.items() if digest is None or self._first.get(name) != digest]


def _unsaved(models: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, model in enumerate(models):
        prefix = f"model {number}" if number else "model"
        for path, module in model.named_modules(prefix=prefix):
            for name in sorted(module._non_persistent_buffers_set):
                if (buffer := module._buffers.get(name)) is not None:
                    yield f"{path}.{name}", buffer


def _digest(buffer: torch.Tensor) -> str | None:
    """Of its bytes on this rank: all of them have to be read, for not every change counts the tensor's version up. None
    of one that cannot be read."""
    local: Any = buffer.to_local() if hasattr(buffer, "to_local") else buffer
    try:
        flat = local.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError):  # sparse, quantized, or without memory
        return None
    return f"{buffer.dtype} {tuple(buffer.shape)} {zlib.crc32(flat.data):08x}"
