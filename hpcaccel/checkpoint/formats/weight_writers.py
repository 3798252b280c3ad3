"""Streaming writers of safetensors and ``torch.save`` files: they keep only one tensor in memory at a time.

The libraries' own functions need all tensors in memory. https://huggingface.co/docs/safetensors describes the
safetensors format. A ``torch.save`` file is a zip archive. Its record ``data.pkl`` contains the nested values, in which
each tensor refers to a storage. Each storage has its own record, aligned so that it can be memory-mapped.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcaccel.checkpoint.formats.weights import Weight
from hpcaccel.checkpoint.snapshot_memory import raw_bytes
from hpcaccel.checkpoint.tree import dtype_name
from hpcaccel.checkpoint_files.weight_files import CODES, SAFE, index_text, share_out
from hpcaccel.core.durable_files import DIRECTORY_MODE, FILE_MODE, atomic_write, fsync_directory
from hpcaccel.errors import CheckpointError

__all__ = ["write_safetensors", "write_torch"]

log = logging.getLogger(__name__)

ALIGNMENT_BYTES = 64
"""The data of each record begins at a multiple of this, as in ``torch.save`` files."""
_PADDING_ID = b"FB"
"""Id of the extra field that torch uses for padding."""
_LOCAL_HEAD_BYTES, _ZIP64_BYTES = 30, 20
"""Size in bytes of a record's header in a zip archive (without name and extra fields), and of its zip64 extra field."""
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
"""The storage class that represents each dtype in the file. Newer dtypes have none and use untyped storages."""


# -- safetensors


def write_safetensors(
    target: Path, weights: Sequence[Weight], *, max_shard_bytes: int, wrote: Callable[[int], None]
) -> list[str]:
    """Write a model in the layout of the Hugging Face libraries.

    A tensor with several names is written once; the other names are in the file's metadata.

    Args:
        target: a directory; created if it does not exist.
        max_shard_bytes: maximum total size in bytes of the tensors in one file; a larger tensor gets its own file.
        wrote: called with the size in bytes of each tensor after it is written.

    Returns:
        The names of the files written.

    Raises:
        CheckpointError: ``target`` is a file or already contains a model, or the format does not support a dtype.
    """
    if target.is_file():
        raise CheckpointError(f"{target} is a file; safetensors output needs a directory")
    if target.is_dir() and (there := sorted(item.name for item in target.iterdir() if SAFE.owns(item.name))):
        raise CheckpointError(
            f"{target} already contains a model ({there[0]}), which is not overwritten. Choose another directory"
        )
    if odd := sorted({str(weight.dtype) for weight in weights if dtype_name(weight.dtype) not in CODES}):
        raise CheckpointError(f"safetensors files cannot store {', '.join(odd)}: cast with --dtype, or use --to torch")
    is_new = not target.exists()
    target.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    plan = [[weights[at] for at in share] for share in share_out([one.bytes for one in weights], max_shard_bytes)]
    names = SAFE.names(len(plan))
    temporary = [target / f".{name}.{os.getpid()}.tmp" for name in names]
    try:
        for path, part in zip(temporary, plan, strict=True):
            _write_safetensors_file(path, part, wrote)
        for path, name in zip(temporary, names, strict=True):
            os.replace(path, target / name)
    except BaseException:
        with _warning_of_leftovers():
            for path in temporary:
                path.unlink(missing_ok=True)
            if is_new:
                target.rmdir()
        raise
    if len(plan) > 1:
        places = {weight.name: name for name, part in zip(names, plan, strict=True) for weight in part}
        atomic_write(target / SAFE.index_name, index_text(places, sum(weight.bytes for weight in weights)))
        names = [*names, SAFE.index_name]
    fsync_directory(target)
    return names


@contextmanager
def _warning_of_leftovers() -> Iterator[None]:
    """Log what prevents a cleanup after an error, instead of raising it in place of that error."""
    try:
        yield
    except OSError as error:
        log.warning("%s was not removed: %s", error.filename, error.strerror)


def _write_safetensors_file(path: Path, weights: Sequence[Weight], wrote: Callable[[int], None]) -> None:
    # Largest element size first, as in the safetensors library, so that all tensors are aligned.
    ordered = sorted(weights, key=lambda weight: (-weight.dtype.itemsize, weight.name))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    with os.fdopen(fd, "wb") as file:
        file.write(_safetensors_head(ordered))
        for weight in ordered:
            file.write(raw_bytes(weight.read()))
            wrote(weight.bytes)
        file.flush()
        os.fsync(file.fileno())


def _safetensors_head(weights: Sequence[Weight]) -> bytes:
    ties = {tie: weight.name for weight in weights for tie in weight.ties}
    head: dict[str, object] = {"__metadata__": {"format": "pt", **ties}}
    at = 0
    for weight in weights:
        head[weight.name] = {
            "dtype": CODES[dtype_name(weight.dtype)],
            "shape": list(weight.shape),
            "data_offsets": [at, at + weight.bytes],
        }
        at += weight.bytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


# -- torch.save


@dataclass(frozen=True)
class _Storage:
    """Placeholder for a tensor's storage while the values are pickled."""

    kind: type
    key: str
    count: int


def write_torch(target: Path, value: Any, *, wrote: Callable[[int], None]) -> None:
    """Write a file that ``torch.load`` can read.

    Args:
        value: nested dicts, lists and plain values, in which each tensor is a ``Weight``.
        wrote: called with the size in bytes of each tensor after it is written.

    Raises:
        CheckpointError: ``target`` exists.
    """
    if target.exists():
        raise CheckpointError(f"{target} already exists and is not overwritten")
    target.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    data = io.BytesIO()
    pickler = _Pickler(data)
    pickler.dump(value)
    try:
        with temporary.open("xb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                _write_record(archive, "data.pkl", data.getbuffer())
                _write_record(archive, "byteorder", sys.byteorder.encode())
                for key, weight in pickler.weights.items():
                    _write_record(archive, f"data/{key}", raw_bytes(weight.read()))
                    wrote(weight.bytes)
                _write_record(archive, "version", b"3\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with _warning_of_leftovers():
            temporary.unlink(missing_ok=True)
        raise
    fsync_directory(target.parent)


def _write_record(archive: zipfile.ZipFile, name: str, data: Any) -> None:
    """Write a record whose data starts at a multiple of the alignment."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}")
    info.file_size = len(data)
    large = len(data) * 1.05 > zipfile.ZIP64_LIMIT  # the same condition as in zipfile
    head = _LOCAL_HEAD_BYTES + len(info.filename.encode()) + len(_PADDING_ID) + 2 + (_ZIP64_BYTES if large else 0)
    assert archive.fp is not None
    length = -(archive.fp.tell() + head) % ALIGNMENT_BYTES
    info.extra = _PADDING_ID + length.to_bytes(2, "little") + b"Z" * length
    with archive.open(info, "w", force_zip64=large) as record:
        record.write(data)


class _Pickler(pickle.Pickler):
    """Pickles a ``Weight`` as ``torch.save`` pickles a tensor, without reading the tensor."""

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
