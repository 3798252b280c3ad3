"""A model's weight files, without torch: names and shards as in the Hugging Face libraries, and safetensors headers.

https://huggingface.co/docs/safetensors describes the safetensors format.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpcaccel.checkpoint_files.contents import item_bytes
from hpcaccel.errors import Damaged

__all__ = [
    "CODES",
    "DTYPES",
    "MODEL_NAME",
    "SAFE",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME",
    "SIZE_ADVICE",
    "TORCH",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
    "Form",
    "Head",
    "SafeTensor",
    "index_text",
    "parse_size",
    "read_head",
    "read_index",
    "safetensors_problems",
    "share_out",
]

MODEL_NAME = "pytorch_model"
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME = f"{MODEL_NAME}{{suffix}}.bin"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_MODEL_NAME = "model"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME = f"{SAFE_MODEL_NAME}{{suffix}}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"

SIZE_ADVICE = "give a number of bytes, or a number with a unit such as '5GB' or '5GiB'"

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}


class Form(NamedTuple):
    """The names of the weight files in one format, built from a stem and a suffix."""

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
        """The names of ``count`` files that hold one model."""
        return [self.single] if count == 1 else [self.part(number + 1, count) for number in range(count)]

    def owns(self, name: str) -> bool:
        """Whether ``name`` is the name of a weight file or an index in this format."""
        parts = re.escape(self.stem) + r"-\d{5}-of-\d{5}" + re.escape(self.suffix)
        return name in (self.single, self.index_name) or re.fullmatch(parts, name) is not None


SAFE = Form(SAFE_MODEL_NAME, ".safetensors")
TORCH = Form(MODEL_NAME, ".bin")


def share_out(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Distribute tensors over files, in order. Returns a list for each file, of which there is at least one: the
    positions in ``sizes`` of the file's tensors.

    Args:
        sizes: size of each tensor in bytes.
        limit: maximum total size in bytes of the tensors in one file; a larger tensor gets its own file.
    """
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
    """The JSON text of an index, which maps each tensor to its file."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(index, indent=2) + "\n"


def read_index(path: Path) -> dict[str, str]:
    """For each tensor's name in an index, the name of its file. The names are the values of ``weight_map``, or of the
    whole object if it has no such key.

    Raises:
        Damaged: the file is missing, or is not an index.
    """
    try:
        index = json.loads(path.read_bytes())
        places = index.get("weight_map", index)
        if not all(isinstance(file, str) for file in places.values()):
            raise TypeError("a file name is not a string")
        return dict(places)
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is not an index of weight files, or is damaged: {error!r}") from None


def parse_size(text: str) -> int | None:
    """A size such as ``"5GB"`` (in powers of 1,000) or ``"5GiB"`` (of 1,024) in bytes; None if ``text`` is not a size.
    A lower-case ``b``, as in ``"5Gb"``, means bits."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?(?:i?B)?)\s*", text, re.IGNORECASE)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS:
        return None
    found = int(float(match[1]) * _UNITS[unit])
    return found // 8 if text.strip().endswith("b") else found


DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
"""Maps each dtype code of the safetensors format to torch's name of the dtype."""
CODES = {name: code for code, name in DTYPES.items()}

MAX_HEAD_BYTES = 100_000_000
"""Maximum size of a header, as in the safetensors library."""


@dataclass(frozen=True)
class SafeTensor:
    """A tensor in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Offset of the first byte from the beginning of the file."""
    length: int
    """Size in bytes."""


@dataclass(frozen=True)
class Head:
    """The header of a safetensors file."""

    tensors: dict[str, SafeTensor]
    metadata: dict[str, str]
    end: int
    """Offset of the end of the last tensor."""


def read_head(path: Path) -> Head:
    """Read the header of a file.

    Raises:
        Damaged: the file is missing, is not a safetensors file, or its header is damaged.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEAD_BYTES:
                raise ValueError(f"invalid header length of {length} bytes")
            head = json.loads(file.read(length))
        metadata = head.pop("__metadata__", {})
        begin = 8 + length
        tensors = {name: _tensor(item, begin) for name, item in head.items()}
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is damaged, or not a safetensors file: {error!r}") from None
    return Head(tensors, metadata, max((item.offset + item.length for item in tensors.values()), default=begin))


def _tensor(item: dict[str, object], begin: int) -> SafeTensor:
    start, end = item["data_offsets"]  # type: ignore[misc]  # a wrong type is damage
    shape = tuple(int(length) for length in item["shape"])  # type: ignore[attr-defined]
    return SafeTensor(DTYPES[str(item["dtype"])], shape, begin + int(start), int(end) - int(start))  # type: ignore[has-type]


def safetensors_problems(path: Path) -> Iterator[str]:
    """Messages about damage that is visible from the header and the file size. The format has no CRC."""
    try:
        head = read_head(path)
    except Damaged as error:
        yield str(error)
        return
    size = path.stat().st_size
    if size != head.end:
        yield f"{path} has {size} bytes, but its header describes {head.end}"
    at = None
    for name, tensor in sorted(head.tensors.items(), key=lambda item: item[1].offset):
        if tensor.length != math.prod(tensor.shape) * item_bytes(tensor.dtype):
            yield f"{path}: {name} has {tensor.length} bytes for shape {list(tensor.shape)} of {tensor.dtype}"
        if at is not None and tensor.offset != at:
            yield f"{path}: {name} does not start where the previous tensor ends"
        at = tensor.offset + tensor.length
