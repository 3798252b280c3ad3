"""Files that survive a kill (JSON files replaced atomically, JSON lines appended whole), file locks,
and JSON lines over a pipe.

A JSON file is written under a temporary name and renamed, so that a reader sees the old content or the new. A
JSON-lines file grows by whole lines: a torn last line does not affect the other lines.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from hpcaccel.errors import RunDirectoryError

__all__ = [
    "DIRECTORY_MODE",
    "FILE_MODE",
    "MOVED",
    "PRIVATE_MODE",
    "LineSplitter",
    "append_bytes",
    "append_line",
    "atomic_write",
    "atomic_writer",
    "file_system",
    "fsync_directory",
    "json_line",
    "lock_file",
    "make_folder",
    "objects_in",
    "read_json",
    "read_lines",
    "refuse_newer",
    "same_sharing",
    "temporary_files",
    "write_all",
    "write_json",
]

DIRECTORY_MODE = 0o750
FILE_MODE = 0o640
PRIVATE_MODE = 0o600
MOVED = "the run directory no longer exists (was it moved or deleted?)"
_NO_SYNC = {errno.EBADF, errno.EINVAL, errno.ENOTSUP}
"""Errors of fsync(2) on file systems that cannot sync a directory."""


def fsync_directory(path: Path) -> None:
    """Make a rename in ``path`` durable. Errors of file systems that cannot sync a directory are ignored."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(fd)


def atomic_write(
    path: Path, content: str | bytes, *, mode: int = FILE_MODE, sync: bool = True, whatever_umask: bool = False
) -> None:
    """Replace the content of ``path`` so that a reader sees either the old or the new content. With ``sync``, this also
    holds after a machine crash. With ``whatever_umask``, the file has ``mode`` even if the umask is stricter."""
    with atomic_writer(path, mode=mode, sync=sync) as file:
        if whatever_umask:
            os.fchmod(file.fileno(), mode)
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_writer(path: Path, *, mode: int = FILE_MODE, sync: bool = True) -> Iterator[IO[bytes]]:
    """Context manager (``with ... as file``) that replaces ``path`` at its end, as ``atomic_write`` does, with what was
    written to ``file``. After an exception, ``path`` is unchanged."""
    temporary = _temporary(path, f"{os.getpid()}.{os.urandom(3).hex()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        fsync_directory(path.parent)


def _temporary(path: Path, mark: str) -> Path:
    return path.with_name(f".{path.name}.{mark}.tmp")


def temporary_files(path: Path) -> list[Path]:
    """The temporary files of ``path``: of an ``atomic_writer`` that is writing, or whose process was killed."""
    pattern = _temporary(Path(glob.escape(path.name)), "*").name
    return sorted(path.parent.glob(pattern))


def file_system(device: int) -> str | None:
    """Type of the mounted file system with this device number, such as ``lustre``, from proc(5); None if unknown."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            place, _, source = line.partition(" - ")
            if place.split()[2:3] == [wanted]:
                return source.partition(" ")[0]
    return None


def make_folder(path: Path, *, within: Path | None = None, mode: int = DIRECTORY_MODE) -> None:
    """Create a folder and its missing parents, but never recreate a run directory that was moved or deleted.

    Args:
        within: the run directory; by default ``HPCACCEL_RUN_DIR``, which is set in the ranks.

    Raises:
        OSError: the folder cannot be created; FileNotFoundError if the run directory is missing.
    """
    run = within or os.environ.get("HPCACCEL_RUN_DIR")
    if run and Path(path).is_relative_to(run) and not os.path.isdir(run):
        raise FileNotFoundError(errno.ENOENT, MOVED, str(run))
    path.mkdir(mode=mode, parents=True, exist_ok=True)


def same_sharing(folder: Path, *, like: Path) -> None:
    """Let the group write to ``folder`` if it may write to the folder ``like`` (``sharing: group``)."""
    try:
        mode = like.stat().st_mode
    except FileNotFoundError:
        return
    if mode & stat.S_IWGRP:
        folder.chmod(stat.S_IMODE(mode))


def write_json(path: Path, value: Mapping[str, Any], *, mode: int = FILE_MODE, sync: bool = True) -> None:
    atomic_write(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", mode=mode, sync=sync)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``; None if there is no such file.

    Raises:
        RunDirectoryError: the file is not a JSON object.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        value = json.loads(data)
    except ValueError as error:
        raise RunDirectoryError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RunDirectoryError(f"{path} does not contain a JSON object")
    return value


def append_line(path: Path, value: Mapping[str, Any], *, sync: bool = False) -> None:
    """Append one JSON line. A torn line left by a crash is terminated first, so that the new line is intact.

    Args:
        sync: fsync before returning.
    """
    append_bytes(path, json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n", sync=sync)


def append_bytes(path: Path, lines: bytes, *, sync: bool = False) -> None:
    """Append whole lines, as ``append_line`` does."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, FILE_MODE)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            lines = b"\n" + lines
        while lines:  # if the disk fills up, write(2) writes only a part, and the next call fails
            lines = lines[os.write(fd, lines) :]
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def refuse_newer(value: Mapping[str, Any], newest: int, source: Path) -> None:
    """Refuse a file that a newer hpcaccel wrote in a format that this one cannot read.

    ``value`` is its contents, and ``newest`` the newest version that this release reads. Raises RunDirectoryError.
    """
    version = value.get("version", 1)
    if isinstance(version, int) and version > newest:
        raise RunDirectoryError(
            f"{source} has format version {version}, written by a newer hpcaccel; this one reads versions up to "
            f"{newest}. Upgrade hpcaccel"
        )


def read_lines(path: Path, *, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """The objects of a JSON-lines file, each with the byte offset of its end, where a later read continues.

    Torn lines and lines that are not JSON objects are skipped; an unfinished last line is left for the next read.
    """
    try:
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return
    with file:
        file.seek(offset)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            offset += len(raw)
            try:
                value = json.loads(raw)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value, offset


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def lock_file(
    file: int | IO[Any], *, wait: bool = True, shared: bool = False
) -> Literal["held", "busy", "unsupported"]:
    """Lock an open file with flock(2), until all processes that share the open file have closed it or exited.

    Args:
        wait: whether to wait while another process holds the lock.

    Returns:
        ``held`` if this process now holds the lock; ``busy`` if another process holds it and ``wait`` is False;
        ``unsupported`` if the file system has no locks (NFS without a lock daemon, some Lustre mounts), so that the
        caller must continue without a lock.

    Raises:
        OSError: the lock fails for another reason.
    """
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        return "busy"
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return "unsupported"
    return "held"


class LineSplitter:
    """Splits data read from a pipe into whole lines and buffers the unfinished last one."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that ``piece`` completes, without their newline."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return lines


def json_line(value: Mapping[str, Any]) -> bytes:
    """``value`` as one line."""
    return json.dumps(value).encode() + b"\n"


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, in several writes if needed.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def objects_in(output: str | bytes, *, keys: frozenset[str] | set[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects in a job step's output, one per line, that have all of ``keys``. Other lines, such as those of
    login scripts, are skipped."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and keys <= value.keys():
            yield value
