"""Read and verify ``torch.distributed.checkpoint`` checkpoints without torch.

``.metadata`` is a pickle. It is read with a restricted unpickler, which imports and runs nothing that the file names.
Each tensor chunk and each non-tensor value is a ``torch.save`` archive in a ``.distcp`` file. Only these archives have
CRCs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcaccel.checkpoint_files.checksums import THREADS, OnProgress, VerifyReport, covering_problem
from hpcaccel.checkpoint_files.contents import item_bytes
from hpcaccel.checkpoint_files.pickle_reader import Record, read_pickle
from hpcaccel.checkpoint_files.torch_archive import archive_problem, is_archive
from hpcaccel.errors import Damaged

__all__ = ["METADATA", "Dcp", "DcpLocation", "DcpTensor", "is_dcp", "verify_dcp"]

METADATA = ".metadata"

_DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
    "bool", "complex128", "complex64", "complex32",
]  # fmt: skip


@dataclass(frozen=True)
class DcpLocation:
    """Location of the archive that contains one tensor chunk or one non-tensor value.

    Args:
        transforms: names of the transforms, such as compression, that were applied to the archive.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class DcpTensor:
    """Dtype, shape and chunks of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Offset and shape of each chunk."""


@dataclass(frozen=True)
class Dcp:
    """The content of ``.metadata``."""

    path: Path
    tensors: dict[str, DcpTensor]
    values: tuple[str, ...]
    """Keys of values that are not tensors."""
    places: dict[tuple[str, tuple[int, ...] | None], DcpLocation]
    """Location by key and chunk offset; the offset of a non-tensor value is None."""
    nested: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The path of each key in the nested dicts that were saved."""

    def file(self, place: DcpLocation) -> Path:
        """The file of an archive.

        Raises:
            Damaged: the file is outside the checkpoint's directory.
        """
        if not _inside(place.file):
            raise Damaged(
                f"{self.path / METADATA} refers to {place.file!r}, which is outside the checkpoint's directory"
            )
        return self.path / place.file

    @classmethod
    def read(cls, path: Path) -> Dcp:
        """Read ``.metadata``.

        Raises:
            Damaged: the file is missing or damaged, or refers to classes that no checkpoint needs.
        """
        where = path / METADATA
        found = read_pickle(where, _NAMES)
        try:
            return _converted(path, found)
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise Damaged(
                f"{where} is damaged, or was not written by torch.distributed.checkpoint: {error!r}"
            ) from None


def is_dcp(path: Path) -> bool:
    return (path / METADATA).is_file()


# -- .metadata


class _Index(Record):
    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and self._key == other._key

    @property
    def _key(self) -> tuple[Any, Any]:
        return self.__dict__.get("fqn"), self.__dict__.get("offset")


class _Tensor(Record):
    properties: Any
    size: Any
    chunks: Any


class _Bytes(Record):
    pass


_HOME = "torch.distributed.checkpoint.metadata"
_NAMES: dict[str, Any] = {
    **{f"{_HOME}.{name}": Record for name in ("Metadata", "TensorProperties", "ChunkStorageMetadata", "StorageMeta")},
    f"{_HOME}.TensorStorageMetadata": _Tensor,
    f"{_HOME}.BytesStorageMetadata": _Bytes,
    f"{_HOME}.MetadataIndex": _Index,
    f"{_HOME}._MEM_FORMAT_ENCODING": Record,
    # older versions of torch
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": Record,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": Record,
    "torch.distributed.checkpoint.filesystem._StorageInfo": Record,
    "torch.Size": lambda values=(): tuple(values),
    "torch.serialization._get_layout": Record,
    **{f"{module}.{name}": Record for module in ("pathlib", "pathlib._local")
       for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")},
    **{f"torch.{name}": name for name in _DTYPES},
}  # fmt: skip
"""Replacements for the classes, functions and dtypes in ``.metadata``; see ``pickle_reader.read_pickle``."""


def _converted(path: Path, found: Any) -> Dcp:
    tensors, values = {}, []
    for key, item in found.state_dict_metadata.items():
        if isinstance(item, _Tensor):
            chunks = tuple((_numbers(chunk.offsets), _numbers(chunk.sizes)) for chunk in item.chunks)
            properties = item.properties
            dtype = properties.state[0] if hasattr(properties, "state") else properties.dtype
            tensors[str(key)] = DcpTensor(str(dtype), _numbers(item.size), chunks)
        else:
            values.append(str(key))
    places = {}
    for index, info in found.storage_data.items():
        at = index.__dict__.get("offset")
        transforms = tuple(map(str, info.__dict__.get("transform_descriptors") or ()))
        place = DcpLocation(str(info.relative_path), int(info.offset), int(info.length), transforms)
        if place.offset < 0 or place.length < 0:
            raise ValueError(f"{index.fqn}: negative offset {place.offset} or length {place.length}")
        places[str(index.fqn), None if at is None else _numbers(at)] = place
    planned = found.__dict__.get("planner_data") or {}
    nested = {str(key): tuple(map(str, way)) for key, way in planned.items() if isinstance(way, tuple)}
    return Dcp(path, tensors, tuple(values), places, nested)


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


# -- verification


def verify_dcp(path: Path, on_progress: OnProgress = lambda done, total: None) -> VerifyReport:
    """Verify the checkpoint ``path``: file sizes, archive CRCs, and that the chunks cover their tensors."""
    report = VerifyReport(path, "dcp")
    try:
        found = Dcp.read(path)
    except Damaged as error:
        report.problems.append(str(error))
        return report
    report.problems += _coverage_problems(found)
    report.problems += _file_problems(found)
    work = sorted(found.places.items(), key=lambda item: (item[1].file, item[1].offset))
    total, done, lock = sum(place.length for _, place in work), 0, threading.Lock()

    def check(item: tuple[tuple[str, tuple[int, ...] | None], DcpLocation]) -> tuple[str | None, str | None]:
        nonlocal done
        (key, at), place = item
        result = _check_archive(found, key, at, place)
        with lock:
            done += place.length
            on_progress(done, total)
        return result

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(check, work))
    report.problems += [problem for problem, _ in results if problem is not None]
    report.notes.append(f"{METADATA} has no CRC: it was only compared with the data files")
    report.notes += sorted({note for _, note in results if note is not None})
    report.bytes = sum(place.length for (_, place), result in zip(work, results, strict=True) if result[1] is None)
    return report


def _coverage_problems(found: Dcp) -> Iterator[str]:
    where = found.path / METADATA
    for key, tensor in found.tensors.items():
        if (problem := covering_problem(tensor.shape, tensor.chunks)) is not None:
            yield f"{where}: {key} has invalid chunks: {problem}"
        for at, shape in tensor.chunks:
            if (key, at) not in found.places and 0 not in shape:
                yield f"{where} does not state where the chunk of {key} at {list(at)} is stored"
    for key in found.values:
        if (key, None) not in found.places:
            yield f"{where} does not state where {key} is stored"


def _file_problems(found: Dcp) -> Iterator[str]:
    ends: dict[str, int] = {}
    for place in found.places.values():
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        file = found.path / name
        if not _inside(name):
            yield f"{found.path / METADATA} refers to {name!r}, outside the checkpoint's directory"
        elif not file.is_file():
            yield f"{file} is missing"
        elif file.stat().st_size < end:
            yield f"{file} has {file.stat().st_size} bytes, but needs at least {end}"


def _inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def _check_archive(
    found: Dcp, key: str, at: tuple[int, ...] | None, place: DcpLocation
) -> tuple[str | None, str | None]:
    """Check one archive. Returns a message about a problem, or None; and a note if it could not be checked, or None."""
    file = found.path / place.file
    if not _inside(place.file) or not file.is_file() or file.stat().st_size < place.offset + place.length:
        return None, None  # reported by _file_problems()
    if place.transforms:
        return None, f"tensors stored with {', '.join(place.transforms)} were not checked"
    tensor = found.tensors.get(key)
    needed: int | None = None
    if tensor is not None:
        shape: tuple[int, ...] = next((shape for begin, shape in tensor.chunks if begin == at), ())
        needed = math.prod(shape) * item_bytes(tensor.dtype)
    if not is_archive(file, place.offset):
        return f"{file}: {key} at byte {place.offset} is not a torch.save archive", None
    problem = archive_problem(file, place.offset, place.length, data_bytes=needed)
    return (
        None if problem is None else f"{file}: {key}, {place.length} bytes from byte {place.offset}: {problem}",
        None,
    )
