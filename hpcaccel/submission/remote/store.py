"""The other side: where code arrives, once for each content, whoever submits it and however often.

``<runs_dir>/.code/<hash>/`` holds the files and ``<hash>.json`` their list: a copy counts once that is there.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from hpcaccel.core.run_dir import DIRECTORY_MODE, read_json, write_json
from hpcaccel.errors import RunDirectoryError
from hpcaccel.submission.code_copy import SENT_CODE
from hpcaccel.submission.remote.protocol import FrameWriter

__all__ = ["code_folder", "receive"]

CHUNK_BYTES = 1 << 18


def code_folder(runs_dir: Path) -> Path:
    """Raises RunDirectoryError when it cannot be made."""
    folder = runs_dir / SENT_CODE
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot make {folder} on the cluster: {error.strerror}. Choose another place with runs_dir in the profile"
        ) from None
    return folder


def receive(request: dict[str, Any], runs_dir: Path, stream: BinaryIO, frames: FrameWriter) -> None:
    """Take in an archive of code, from where an earlier try broke off.

    The answer's first frame says what is there already (``have``), then the rest comes on ``stream``.

    Raises:
        RunDirectoryError: the disk is full, or what came is not what was announced.
    """
    folder, name, size = code_folder(runs_dir), str(request["hash"]), int(request["size"])
    if len(name) != 64 or set(name) - set("0123456789abcdef"):
        raise RunDirectoryError(f"{name!r} is no hash")
    part = folder / f".{name}.{size}.part"
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # one of several that send the same does the work
        if read_json(folder / f"{name}.json") is not None:
            part.unlink(missing_ok=True)
            frames.send("have", complete=True, path=str(folder / name))
            return
        have = min(part.stat().st_size, size)
        frames.send("have", complete=False, offset=have)
        try:
            if not _take(stream, file, size - have):
                return  # the connection broke; the next one goes on here
            _unpack(part, folder / name)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                part.unlink(missing_ok=True)
                raise RunDirectoryError(
                    f"the disk is full on the cluster: {folder}: {error.strerror}. Nothing was submitted. Remove what "
                    "is not needed there (old runs and checkpoints), or choose another runs_dir in the profile"
                ) from None
            raise
        part.unlink()
    frames.send("have", complete=True, path=str(folder / name))


def _take(stream: BinaryIO, file: BinaryIO, count: int) -> bool:
    while count:
        piece = stream.read1(min(count, CHUNK_BYTES))  # type: ignore[attr-defined]
        if not piece:
            return False
        file.write(piece)
        file.flush()
        count -= len(piece)
    os.fsync(file.fileno())
    return True


def _unpack(part: Path, target: Path) -> None:
    place = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=DIRECTORY_MODE)
    files: list[str] = []
    try:
        with gzip.open(part) as plain:
            digest = hashlib.file_digest(plain, "sha256") if hasattr(hashlib, "file_digest") else _digest(plain)
            if digest.hexdigest() != target.name:
                raise RunDirectoryError("the code did not arrive as it was sent. Submit once more")
        with tarfile.open(part, "r:gz") as archive:
            for member in archive:
                _put(archive, member, place)
                files.append(member.name)
        shutil.rmtree(target, ignore_errors=True)  # of a try that ended before its list
        os.rename(place, target)
        write_json(target.with_suffix(".json"), {"files": files})
    except (EOFError, gzip.BadGzipFile, tarfile.TarError) as error:
        part.unlink(missing_ok=True)
        raise RunDirectoryError(f"the code did not arrive as it was sent ({error}). Submit once more") from None
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _digest(plain: Any) -> Any:
    digest = hashlib.sha256()
    while piece := plain.read(CHUNK_BYTES):
        digest.update(piece)
    return digest


def _put(archive: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts:
        raise RunDirectoryError(f"the code holds a file {member.name!r} outside of itself")
    target = place / name
    target.parent.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
    if member.issym():
        target.symlink_to(member.linkname)
        return
    source = archive.extractfile(member)
    assert source is not None, "files and links are all that is sent"
    with source, target.open("xb") as file:
        shutil.copyfileobj(source, file)
    target.chmod(member.mode & 0o750)
