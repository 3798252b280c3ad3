"""The head of a safetensors file: what it holds and where. See https://huggingface.co/docs/safetensors."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.checkpoint_files.contents import item_bytes
from hpcaccel.errors import Damaged

__all__ = ["CODES", "DTYPES", "Head", "SafeTensor", "read_head", "safetensors_problems"]

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
CODES = {name: code for code, name in DTYPES.items()}

MAX_HEAD_BYTES = 100_000_000
"""What the safetensors library reads at most."""


@dataclass(frozen=True)
class SafeTensor:
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""
    length: int


@dataclass(frozen=True)
class Head:
    tensors: dict[str, SafeTensor]
    metadata: dict[str, str]
    end: int
    """Of the last tensor's bytes."""


def read_head(path: Path) -> Head:
    """
    Raises:
        Damaged: it is no safetensors file, or its head is damaged.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEAD_BYTES:
                raise ValueError(f"its head would have {length} bytes")
            head = json.loads(file.read(length))
        metadata = head.pop("__metadata__", {})
        begin = 8 + length
        tensors = {name: _tensor(item, begin) for name, item in head.items()}
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{path} is damaged, or no safetensors file: {error!r}") from None
    return Head(tensors, metadata, max((item.offset + item.length for item in tensors.values()), default=begin))


def _tensor(item: dict[str, object], begin: int) -> SafeTensor:
    start, end = item["data_offsets"]  # type: ignore[misc]  # what is not as it should be is damage
    shape = tuple(int(length) for length in item["shape"])  # type: ignore[attr-defined]
    return SafeTensor(DTYPES[str(item["dtype"])], shape, begin + int(start), int(end) - int(start))  # type: ignore[has-type]


def safetensors_problems(path: Path) -> Iterator[str]:
    """What is wrong with a file as far as its head and size can tell; it has no CRC."""
    try:
        head = read_head(path)
    except Damaged as error:
        yield str(error)
        return
    size = path.stat().st_size
    if size != head.end:
        yield f"{path} has {size} bytes, its head tells of {head.end}"
    at = None
    for name, tensor in sorted(head.tensors.items(), key=lambda item: item[1].offset):
        if tensor.length != math.prod(tensor.shape) * item_bytes(tensor.dtype):
            yield f"{path}: {name} has {tensor.length} bytes for shape {list(tensor.shape)} of {tensor.dtype}"
        if at is not None and tensor.offset != at:
            yield f"{path}: {name} does not begin where the tensor before it ends"
        at = tensor.offset + tensor.length
