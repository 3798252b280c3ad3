"""Writing what ``torch.load(weights_only=True)`` reads, one tensor at a time.

``torch.save`` needs all tensors in memory. Its format is a zip archive: ``data.pkl`` with the nested values, in which
each tensor points to a storage, and the storages as records of their own, aligned so that they can be mapped.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcaccel.checkpoint.dcp_storage import raw_bytes
from hpcaccel.checkpoint.formats.weights import Weight
from hpcaccel.core.run_dir import DIRECTORY_MODE, fsync_directory
from hpcaccel.errors import CheckpointError

__all__ = ["write_torch"]

ALIGNMENT_BYTES = 64
_PADDING_ID = b"FB"
"""Of the extra field that torch pads with."""
_LOCAL_HEAD_BYTES, _ZIP64_BYTES = 30, 20
_ROOT = "archive"

_STORAGES: dict[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.complex64: torch.ComplexFloatStorage,
}
"""The classes by which a file names them; newer dtypes have none and lie in untyped storages."""


@dataclass(frozen=True)
class _Storage:
    """Stands for the memory of a tensor while the values are pickled."""

    kind: type
    key: str
    count: int


def write_torch(target: Path, value: Any, *, wrote: Callable[[int], None]) -> None:
    """Write nested dicts, lists and plain values in which tensors are ``Weight``.

    Raises:
        CheckpointError: ``target`` exists.
    """
    if target.exists():
        raise CheckpointError(f"{target} exists already; it is not overwritten")
    target.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    data = io.BytesIO()
    pickler = _Pickler(data)
    pickler.dump(value)
    try:
        with temporary.open("xb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                _write(archive, "data.pkl", data.getbuffer())
                _write(archive, "byteorder", sys.byteorder.encode())
                for key, weight in pickler.weights.items():
                    _write(archive, f"data/{key}", raw_bytes(weight.read()))
                    wrote(weight.bytes)
                _write(archive, "version", b"3\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(target.parent)


def _write(archive: zipfile.ZipFile, name: str, data: Any) -> None:
    """A record whose bytes begin at a multiple of the alignment."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}")
    info.file_size = len(data)
    large = len(data) * 1.05 > zipfile.ZIP64_LIMIT  # as zipfile decides
    head = _LOCAL_HEAD_BYTES + len(info.filename.encode()) + len(_PADDING_ID) + 2 + (_ZIP64_BYTES if large else 0)
    assert archive.fp is not None
    length = -(archive.fp.tell() + head) % ALIGNMENT_BYTES
    info.extra = _PADDING_ID + length.to_bytes(2, "little") + b"Z" * length
    with archive.open(info, "w", force_zip64=large) as record:
        record.write(data)


class _Pickler(pickle.Pickler):
    """Tensors become what ``torch.save`` makes of them, without having been read."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.weights: dict[str, Weight] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Weight):
            return NotImplemented
        key = str(len(self.weights))
        self.weights[key] = value
        stride = torch.empty(value.shape, device="meta").stride()
        if value.dtype in _STORAGES:
            storage = _Storage(_STORAGES[value.dtype], key, value.bytes // value.dtype.itemsize)
            return torch._utils._rebuild_tensor_v2, (storage, 0, value.shape, stride, False, OrderedDict())
        storage = _Storage(torch.storage.UntypedStorage, key, value.bytes)
        return torch._utils._rebuild_tensor_v3, (storage, 0, value.shape, stride, False, OrderedDict(), value.dtype)

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return "storage", value.kind, value.key, "cpu", value.count
        return None
