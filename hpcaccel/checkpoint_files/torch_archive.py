"""What ``torch.save`` writes: a zip archive, in which every record has a CRC. Alone in a file or one among others."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hpcaccel.checkpoint_files.contents import BLOCK_BYTES

__all__ = ["Slice", "archive_problem", "is_archive"]

_BEGINS = b"PK\x03\x04"
_END_BYTES = 56 + 20 + 22
_FLAGS = 0x808
"""A CRC behind the data; a name in UTF-8."""


def is_archive(path: Path, offset: int = 0) -> bool:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(len(_BEGINS)) == _BEGINS


class Slice(io.RawIOBase):
    """Bytes of an open file as a file of their own."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        count = max(0, min(len(target), self._length - self._at))
        self._file.seek(self._offset + self._at)
        data = self._file.read(count)
        target[: len(data)] = data
        self._at += len(data)
        return len(data)


@contextmanager
def _opened(path: Path, offset: int, length: int | None) -> Iterator[zipfile.ZipFile]:
    with path.open("rb", buffering=0) as file:
        size = path.stat().st_size - offset if length is None else length
        with zipfile.ZipFile(io.BufferedReader(Slice(file, offset, size), BLOCK_BYTES)) as archive:
            yield archive


def archive_problem(
    path: Path, offset: int = 0, length: int | None = None, *, data_bytes: int | None = None
) -> str | None:
    """What is damaged in the archive at ``offset``, in words; None where every record is what was written.

    Args:
        length: of the archive; None: to the end of the file.
        data_bytes: how many bytes of tensors it must hold at least.
    """
    try:
        with _opened(path, offset, length) as archive:
            _refuse_odd_end(archive)
            held = 0
            for record in archive.infolist():
                _refuse_odd(record)
                _read_all(archive, record)
                held += record.file_size if "/data/" in record.filename else 0
    except OSError:
        raise
    except Exception as error:  # flipped bits make zipfile fail in many ways
        return str(error) or type(error).__name__
    if data_bytes is not None and held < data_bytes:
        return f"it holds {held} bytes of data, {data_bytes} are needed"
    return None


def _refuse_odd(record: zipfile.ZipInfo) -> None:
    """What zipfile passes over and torch stumbles on: fields of the directory, which has no CRC.

    Raises:
        BadZipFile: it is not as ``torch.save`` writes it.
    """
    plain = record.compress_type == zipfile.ZIP_STORED and record.compress_size == record.file_size
    if not plain or record.flag_bits & ~_FLAGS or record.volume or record.external_attr & 0xFF:
        raise zipfile.BadZipFile(f"the directory entry of {record.filename!r} is damaged")


def _refuse_odd_end(archive: zipfile.ZipFile) -> None:
    """The end of the directory, where it is written in the form for large archives, as torch always does.

    Raises:
        BadZipFile: it does not fit to the directory.
    """
    file: Any = archive.fp
    length = file.seek(0, io.SEEK_END)
    if length < _END_BYTES:
        return
    file.seek(length - _END_BYTES)
    end = file.read(_END_BYTES)
    if end[56:60] != b"PK\x06\x07":
        return
    begin, count = archive.start_dir, len(archive.infolist())
    expected = struct.pack("<QQQQ", count, count, length - _END_BYTES - begin, begin)
    locator = struct.pack("<IQI", 0, length - _END_BYTES, 1)
    if end[4:12] != struct.pack("<Q", 44) or any(end[16:24]) or end[24:56] != expected or end[60:76] != locator:
        raise zipfile.BadZipFile("the end of its directory is damaged")


def _read_all(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """
    Raises:
        BadZipFile: its CRC is another one.
    """
    with archive.open(record) as file:
        while file.read(BLOCK_BYTES):
            pass
