"""``torch.save`` archives: zip archives in which every record has a CRC. A ``.distcp`` file contains several."""

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
"""Size of a zip64 archive's last three parts: zip64 end of central directory, its locator, end of central directory."""
_FLAGS = 0x808
"""The flags that a record may have: its CRC follows the data; its name is in UTF-8."""


def is_archive(path: Path, offset: int = 0) -> bool:
    """Whether a zip archive begins at ``offset``."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(len(_BEGINS)) == _BEGINS


class Slice(io.RawIOBase):
    """A part of an open file as a file object."""

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
    """How the archive at ``offset`` is damaged; None if no damage is found. The CRC of every record is checked.

    Args:
        length: size of the archive in bytes; None means that it extends to the end of the file.
        data_bytes: minimum number of bytes of tensor data.
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
    except Exception as error:  # a damaged archive may raise any error
        return str(error) or type(error).__name__
    if data_bytes is not None and held < data_bytes:
        return f"the archive contains {held} bytes of data, but needs {data_bytes}"
    return None


def _refuse_odd(record: zipfile.ZipInfo) -> None:
    """Check the fields of a directory entry that zipfile does not check. The directory has no CRC.

    Raises:
        BadZipFile: the record differs from those that ``torch.save`` writes.
    """
    plain = record.compress_type == zipfile.ZIP_STORED and record.compress_size == record.file_size
    if not plain or record.flag_bits & ~_FLAGS or record.volume or record.external_attr & 0xFF:
        raise zipfile.BadZipFile(f"the directory entry of {record.filename!r} is damaged")


def _refuse_odd_end(archive: zipfile.ZipFile) -> None:
    """Check the zip64 end of the directory, which torch always writes. Archives without it are not checked.

    Raises:
        BadZipFile: the end does not match the directory.
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
        raise zipfile.BadZipFile("the end of the archive's directory is damaged")


def _read_all(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """Read a record, so that zipfile checks its CRC.

    Raises:
        BadZipFile: the CRC is wrong.
    """
    with archive.open(record) as file:
        while file.read(BLOCK_BYTES):
            pass
