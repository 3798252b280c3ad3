"""Checkpoints of ``torch.distributed.checkpoint``, read and checked without torch and without loading a pickle.

``.metadata`` is a pickle: of its objects only the values are taken. Each tensor's chunk, and each other value, is an
archive of ``torch.save`` somewhere in a ``.distcp`` file, and its CRCs are the only ones that there are.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcaccel.checkpoint_files.checksums import THREADS, Report, Tell
from hpcaccel.checkpoint_files.contents import item_bytes
from hpcaccel.checkpoint_files.coverage import covering_problem
from hpcaccel.checkpoint_files.pickle_reader import Record, read_pickle
from hpcaccel.checkpoint_files.torch_archive import archive_problem, is_archive
from hpcaccel.errors import Damaged

__all__ = ["METADATA", "Dcp", "DcpTensor", "Place", "is_dcp", "verify_dcp"]

METADATA = ".metadata"

_DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn_x2", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
    "bool", "complex128", "complex64", "complex32",
]  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where the archive of a chunk or a value lies. ``transforms`` were applied to it, compression for one."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class DcpTensor:
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Of each where it begins and its shape."""


@dataclass(frozen=True)
class Dcp:
    """What ``.metadata`` says."""

    path: Path
    tensors: dict[str, DcpTensor]
    values: tuple[str, ...]
    """Keys of what is no tensor."""
    places: dict[tuple[str, tuple[int, ...] | None], Place]
    """By key and, of a tensor, where the chunk begins."""
    nested: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Where each key was in the nested dicts that were saved."""

    def file(self, place: Place) -> Path:
        """
        Raises:
            Damaged: it would not be in the checkpoint's directory.
        """
        if not _inside(place.file):
            raise Damaged(f"{self.path / METADATA} names {place.file!r}, which is not in the checkpoint's directory")
        return self.path / place.file

    @classmethod
    def read(cls, path: Path) -> Dcp:
        """
        Raises:
            Damaged: ``.metadata`` cannot be read, or names what no checkpoint needs.
        """
        where = path / METADATA
        found = read_pickle(where, _NAMES)
        try:
            return _taken(path, found)
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise Damaged(f"{where} is damaged, or not DCP's: {error!r}") from None


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
    # of older versions of torch
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": Record,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": Record,
    "torch.distributed.checkpoint.filesystem._StorageInfo": Record,
    "torch.Size": lambda values=(): tuple(values),
    "torch.serialization._get_layout": Record,
    **{f"{module}.{name}": Record for module in ("pathlib", "pathlib._local")
       for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")},
    **{f"torch.{name}": name for name in _DTYPES},
}  # fmt: skip


def _taken(path: Path, found: Any) -> Dcp:
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
        place = Place(str(info.relative_path), int(info.offset), int(info.length), transforms)
        if place.offset < 0 or place.length < 0:
            raise ValueError(f"{index.fqn} at byte {place.offset}, {place.length} long")
        places[str(index.fqn), None if at is None else _numbers(at)] = place
    planned = found.__dict__.get("planner_data") or {}
    nested = {str(key): tuple(map(str, way)) for key, way in planned.items() if isinstance(way, tuple)}
    return Dcp(path, tensors, tuple(values), places, nested)


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


# -- checking


def verify_dcp(path: Path, tell: Tell = lambda done, total: None) -> Report:
    """The checkpoint in ``path``: every file long enough, every archive whole, every tensor covered by its chunks."""
    report = Report(path, "dcp")
    try:
        found = Dcp.read(path)
    except Damaged as error:
        report.problems.append(str(error))
        return report
    report.problems += _coverage_problems(found)
    report.problems += _file_problems(found)
    work = sorted(found.places.items(), key=lambda item: (item[1].file, item[1].offset))
    total, done, lock = sum(place.length for _, place in work), 0, threading.Lock()

    def check(item: tuple[tuple[str, tuple[int, ...] | None], Place]) -> tuple[str | None, str | None]:
        nonlocal done
        (key, at), place = item
        answer = _archive_answer(found, key, at, place)
        with lock:
            done += place.length
            tell(done, total)
        return answer

    with ThreadPoolExecutor(THREADS) as pool:
        answers = list(pool.map(check, work))
    report.problems += [problem for problem, _ in answers if problem is not None]
    report.notes.append(f"{METADATA} has no CRC itself: it was checked against the files, and they against it")
    report.notes += sorted({note for _, note in answers if note is not None})
    report.bytes = sum(place.length for (_, place), answer in zip(work, answers, strict=True) if answer[1] is None)
    return report


def _coverage_problems(found: Dcp) -> Iterator[str]:
    where = found.path / METADATA
    for key, tensor in found.tensors.items():
        if (problem := covering_problem(tensor.shape, tensor.chunks)) is not None:
            yield f"{where}: {key} is not covered: {problem}"
        for at, shape in tensor.chunks:
            if (key, at) not in found.places and 0 not in shape:
                yield f"{where} does not say where the chunk of {key} at {list(at)} lies"
    for key in found.values:
        if (key, None) not in found.places:
            yield f"{where} does not say where {key} lies"


def _file_problems(found: Dcp) -> Iterator[str]:
    ends: dict[str, int] = {}
    for place in found.places.values():
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        file = found.path / name
        if not _inside(name):
            yield f"{found.path / METADATA} names {name!r}, which is not in the checkpoint's directory"
        elif not file.is_file():
            yield f"{file} is missing"
        elif file.stat().st_size < end:
            yield f"{file} has {file.stat().st_size} bytes, {end} are needed"


def _inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def _archive_answer(found: Dcp, key: str, at: tuple[int, ...] | None, place: Place) -> tuple[str | None, str | None]:
    """A problem with one archive, and a note where it cannot be checked."""
    file = found.path / place.file
    if not _inside(place.file) or not file.is_file() or file.stat().st_size < place.offset + place.length:
        return None, None  # told already
    if place.transforms:
        return None, f"stored with {', '.join(place.transforms)}, which has no CRC that can be checked here"
    tensor = found.tensors.get(key)
    needed: int | None = None
    if tensor is not None:
        shape: tuple[int, ...] = next((shape for begin, shape in tensor.chunks if begin == at), ())
        needed = math.prod(shape) * item_bytes(tensor.dtype)
    if not is_archive(file, place.offset):
        return f"{file}: {key} at byte {place.offset} is no archive of torch.save", None
    problem = archive_problem(file, place.offset, place.length, data_bytes=needed)
    return (
        None if problem is None else f"{file}: {key}, {place.length} bytes from byte {place.offset} on: {problem}",
        None,
    )
