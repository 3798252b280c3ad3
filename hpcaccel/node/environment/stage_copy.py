"""Copying a file or folder to a node's disk: what is there already and unchanged is not copied again.

A copy is finished when it has its name: until then its name holds the source's size and time, so that an interrupted
one goes on where it stopped if the source is still the same, and never otherwise.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["NoRoom", "bring"]

CHUNK_BYTES = 16 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
SPARE_BYTES = 1 << 20


class NoRoom(Exception):
    """The node's disk is too small for what is to be staged; in words for the user."""


def bring(source: Path, directory: Path) -> int:
    """Have ``directory`` hold a copy of ``source`` under its own name; how many bytes had to be copied.

    Raises:
        NoRoom: there is too little space, seen before anything is copied or while copying.
        OSError: something cannot be read or written.
    """
    target = directory / source.name
    with (directory / f".{source.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two jobs that keep the same data, one copies
        missing = [(one, to) for one, to in _files(source, target) if not _same(one, to)]
        needed = sum(one.stat().st_size - _begun(one, to) for one, to in missing)
        _check_room(directory, needed, source)
        try:
            for one, to in missing:
                _copy(one, to)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise NoRoom(_no_room(directory, needed, source)) from None
        _forget_others(source, target)
        return needed


def _files(source: Path, target: Path) -> Iterator[tuple[Path, Path]]:
    """Each file with its copy's place; folders are made on the way. Links are followed: their targets are elsewhere."""
    if not source.is_dir():
        source.stat()  # a missing one is an error
        yield source, target
        return
    target.mkdir(exist_ok=True)
    for folder, names, files in os.walk(source, onerror=_raise, followlinks=True):
        place = target / Path(folder).relative_to(source)
        for name in names:
            (place / name).mkdir(exist_ok=True)
        for name in files:
            yield Path(folder, name), place / name


def _raise(error: OSError) -> None:
    raise error


def _same(source: Path, copy: Path) -> bool:
    try:
        there = copy.stat()
    except FileNotFoundError:
        return False
    given = source.stat()
    return (there.st_size, there.st_mtime_ns) == (given.st_size, given.st_mtime_ns)


def _part(source: Path, copy: Path) -> Path:
    given = source.stat()
    return copy.with_name(f".{copy.name}.{given.st_size}.{given.st_mtime_ns}.part")


def _begun(source: Path, copy: Path) -> int:
    part = _part(source, copy)
    return part.stat().st_size if part.exists() else 0


def _copy(source: Path, copy: Path) -> None:
    part = _part(source, copy)
    given = source.stat()
    with source.open("rb") as reader, part.open("ab") as writer:
        reader.seek(writer.tell())
        shutil.copyfileobj(reader, writer, CHUNK_BYTES)
    if part.stat().st_size != given.st_size:
        part.unlink()
        raise OSError(errno.EIO, "changed while it was copied", str(source))
    part.chmod(given.st_mode & 0o777 | 0o600)
    os.utime(part, ns=(given.st_atime_ns, given.st_mtime_ns))
    os.replace(part, copy)


def _check_room(directory: Path, needed: int, source: Path) -> None:
    if needed and needed + SPARE_BYTES > shutil.disk_usage(directory).free:
        raise NoRoom(_no_room(directory, needed, source))


def _no_room(directory: Path, needed: int, source: Path) -> str:
    free = shutil.disk_usage(directory).free
    return (
        f"stage: {source} needs {needed / 1e9:.2f} GB more on {directory.parent}, which has {free / 1e9:.2f} GB free. "
        "Stage less, name a larger disk with stage.directory, or ask for one with slurm.tmp"
    )


def _forget_others(source: Path, target: Path) -> None:
    """Remove what the source has no more, and the beginnings of copies of what it was once."""
    if not source.is_dir():
        for left in target.parent.glob(f".{target.name}.*.part"):
            left.unlink()
        return
    for folder, _, files in os.walk(target):
        origin = source / Path(folder).relative_to(target)
        for name in files:
            if not (origin / name).exists():
                Path(folder, name).unlink()
