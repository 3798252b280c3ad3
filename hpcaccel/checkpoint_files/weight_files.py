"""How files of a model's weights are called, and what goes into each: as the Hugging Face libraries do it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["SAFE", "SIZE_WORDS", "TORCH", "Form", "index_text", "parse_size", "share_out"]

SIZE_WORDS = "give bytes, or a number with a unit, such as '5GB' or '5GiB'"

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


class Form(NamedTuple):
    """How files are called."""

    stem: str
    suffix: str

    @property
    def single(self) -> str:
        return self.stem + self.suffix

    @property
    def index_name(self) -> str:
        return f"{self.single}.index.json"

    def part(self, number: int, count: int) -> str:
        return f"{self.stem}-{number:05d}-of-{count:05d}{self.suffix}"

    def names(self, count: int) -> list[str]:
        """The names of so many files together."""
        return [self.single] if count == 1 else [self.part(number + 1, count) for number in range(count)]

    def owns(self, name: str) -> bool:
        """Whether a file of that name is one of a saved model's."""
        parts = re.escape(self.stem) + r"-\d{5}-of-\d{5}" + re.escape(self.suffix)
        return name in (self.single, self.index_name) or re.fullmatch(parts, name) is not None


SAFE = Form("model", ".safetensors")
TORCH = Form("pytorch_model", ".bin")


def share_out(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """The positions of what goes into each file: in order, as long as there is room. There is one file at least."""
    plan: list[list[int]] = [[]]
    used = 0
    for position, size in enumerate(sizes):
        if plan[-1] and used + size > limit:
            plan.append([])
            used = 0
        plan[-1].append(position)
        used += size
    return plan


def index_text(places: Mapping[str, str], total_bytes: int) -> str:
    """The text of an index: which file holds each tensor."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(index, indent=2) + "\n"


def parse_size(text: str) -> int | None:
    """Bytes of ``"5GB"`` (powers of 1,000), ``"5GiB"`` (of 1,024); ``"5Gb"`` are bits. None where it is no size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?(?:i?B)?)\s*", text, re.IGNORECASE)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS:
        return None
    found = int(float(match[1]) * _UNITS[unit])
    return found // 8 if text.strip().endswith("b") else found
