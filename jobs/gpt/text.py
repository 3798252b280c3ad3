"""Text that exists on every machine: the source of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


def standard_library(limit_bytes: int) -> Tensor:
    """The first ``limit_bytes`` bytes of the library's top-level modules, in alphabetical order (uint8)."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


class Windows(Dataset):
    """Consecutive windows of a text: ``context`` bytes, and the same window shifted by one byte (int64 tensors)."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]
