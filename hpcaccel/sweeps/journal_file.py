"""A sweep's journal: JSON lines that many processes on many nodes append to under a lock.

A line counts once it and its own newline are in the file, unless its segment was closed earlier (see below). Readers
take no lock and write nothing. Lines appended with ``sync`` survive a power cut. Any writer may be killed at any time.

The lock is a file created by link(2), which succeeds for one process only, even on a shared file system. The file is
a second name for that process's *claim*, a small file that names the process, so that waiting processes can read who
holds the lock. Kernel locks (fcntl) end with their holder, but some mounts confine them to one node without an error
(NFS with ``nolock``, Lustre with ``localflock``, BeeGFS by default). A lock is never broken: if its holder is dead or
holds it for too long, the journal *segment* that the lock belongs to is closed (see ``journal_segments``).
"""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import FILE_MODE, fsync_directory
from hpcaccel.core.process_identity import process_start
from hpcaccel.errors import RunDirectoryError
from hpcaccel.sweeps.journal_segments import WRITABLE, Segments

__all__ = ["PATIENCE_SECONDS", "JournalFile", "LockClaim", "is_dead", "owner_of"]

PATIENCE_SECONDS = 5.0
"""How long to wait for a lock holder that may be alive (it is on another node, or suspended). The lock is normally held
for milliseconds; closing the segment of a holder that is merely slow costs one file."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.0005, 0.05
LOOK_EVERY_SECONDS = 0.05
"""Interval at which a waiting process checks whether the holder is alive."""


class LockClaim:
    """The file beside the journal that names this process. It is created on first use and removed with this object or
    at exit, together with the claims of killed processes on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._pid = 0
        self._token = ""

    def hold(self, lock: Path, patience_seconds: float) -> bool:
        """Wait for the lock and take it.

        Returns:
            True if this process holds the lock; False if the holder is dead or has held it for ``patience_seconds``.

        Raises:
            OSError: the folder is not writable.
        """
        since = looked = time.monotonic()
        seen: str | None = ""
        pause = FIRST_PAUSE_SECONDS
        while not self._taken(lock):
            now = time.monotonic()
            if now - looked > LOOK_EVERY_SECONDS:
                owner, looked = owner_of(lock), now
                token = owner.get("token", "") if owner is not None else None
                if token == self._token:
                    return True  # the reply to our link(2) was lost and NFS repeated the request
                if token != seen:
                    since, seen = now, token
                elif token is not None and now - since > patience_seconds:
                    return False
                if is_dead(owner):
                    return False
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)
        return True

    def _taken(self, lock: Path) -> bool:
        while True:
            if self._path is None or self._pid != os.getpid():
                self._make()
            assert self._path is not None
            try:
                os.link(self._path, lock)
                return True
            except FileExistsError:
                return False
            except FileNotFoundError:
                self._path = None  # the claim was removed: create it again, or fail if the folder is gone

    def _make(self) -> None:
        machine, host = _machine(), socket.gethostname()
        pid, nonce = os.getpid(), os.urandom(4).hex()
        path = self._folder / f".journal-{host}-{pid}-{nonce}.claim"
        token = f"{machine}-{pid}-{nonce}"
        owner = {"host": host, "machine": machine, "pid": pid, "start": process_start(pid), "token": token}
        try:
            path.write_text(json.dumps(owner), encoding="utf-8")
        except OSError:
            path.unlink(missing_ok=True)
            raise
        self._path, self._pid, self._token = path, pid, token
        weakref.finalize(self, _leave, path, pid, host)
        _tidy(self._folder, host)


def owner_of(lock: Path) -> dict[str, Any] | None:
    """The claim of the lock's holder; None if the lock is free, empty if the file cannot be read or parsed.

    The file is opened, because stat(2) alone may return what an NFS client has cached.
    """
    try:
        value = json.loads(lock.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def is_dead(owner: dict[str, Any] | None) -> bool:
    """Whether a lock's owner is certainly dead. Only the owner's host can determine this, even after a reboot."""
    if not owner:
        return False
    machine = _machine()
    if owner.get("machine") == machine:
        return bool(process_start(int(owner["pid"])) != owner["start"])
    rebooted = str(owner.get("machine")).partition(":")[0] != machine.partition(":")[0]
    return bool(rebooted and owner.get("host") == socket.gethostname())


@lru_cache(maxsize=1)
def _machine() -> str:
    """Identifies this boot of this machine and its pid namespace (containers may have their own)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{os.urandom(8).hex()}:"  # without /proc: identifies only this process


def _leave(claim: Path, pid: int, host: str) -> None:
    """Remove the claim, unless this process is a forked child of its creator. Locks are other hard links to the same
    file, and are kept."""
    if pid != os.getpid():
        return
    try:
        claim.unlink(missing_ok=True)
        _tidy(claim.parent, host)
    except OSError:
        pass  # a file of about 100 bytes; the next process on this machine removes it


def _tidy(folder: Path, host: str) -> None:
    """Remove the claims of killed processes on this machine."""
    for path in folder.glob(f".journal-{host}-*.claim"):
        if is_dead(owner_of(path)):
            path.unlink(missing_ok=True)


TORN = b"~\n"
"""Appended to an incomplete line to end it. This makes the line invalid even if only its newline was missing: the
line's writer has died, or has reported an error to its caller."""

ADVICE = {
    errno.ENOSPC: "The disk is full: free some space",
    errno.EDQUOT: "Your disk quota is exceeded: free some space",
    errno.EFBIG: "The file size limit is reached: see ulimit -f",
    errno.EROFS: "The file system is mounted read-only: remount it for writing, or copy the sweep to a writable place",
    errno.ENOENT: "The sweep's directory no longer exists: restore it",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "You have no write permission: check with ls -ld"),
}


class JournalFile:
    """The journal at ``path``, which need not exist yet. The constructor accesses no file.

    Args:
        patience_seconds: how long to wait for a lock holder that may be alive.
    """

    def __init__(self, path: str | os.PathLike[str], *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.path = Path(path).absolute()
        self.patience_seconds = patience_seconds
        self._segments = Segments(self.path)
        self._claim = LockClaim(self.path.parent)
        self._thread = threading.Lock()

    def append(self, lines: Iterable[Mapping[str, Any]], *, sync: bool = False) -> None:
        """Append objects as lines, in order, with no line of another process between them.

        Raises:
            RunDirectoryError: the journal cannot be written, for example because the disk is full. Earlier lines are
                intact. A new line counts only if it was written completely.
        """
        data = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        try:
            with self._thread:
                self._append(data, sync)
        except OSError as error:
            raise self._refused(error) from error

    def sync(self) -> None:
        """Flush to disk the lines that this process has appended, so that they survive a power cut.

        Raises:
            RunDirectoryError: see ``append``.
        """
        try:
            fd = os.open(self._segments.path(self._segments.newest), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return  # nothing was appended
        except OSError as error:
            raise self._refused(error) from error

    def lines(self, offset: int = 0) -> Iterator[tuple[bytes, int]]:
        """Lines from ``offset`` on, including invalid ones, each with the offset after it."""
        for behind, data in self.pieces(offset):
            begin = behind - len(data)
            for line in data[:-1].split(b"\n"):
                begin += len(line) + 1
                yield line, begin

    def pieces(self, offset: int = 0) -> Iterator[tuple[int, bytes]]:
        """Like ``lines``, but in chunks of many lines. Yields the offset after each chunk, and the chunk."""
        try:
            yield from self._segments.pieces(offset)
        except OSError as error:
            raise RunDirectoryError(f"cannot read the sweep's journal {self.path}: {error.strerror}") from error

    def _append(self, data: bytes, sync: bool) -> None:
        while True:
            number = self._segments.newest
            if not self._claim.hold(self._segments.lock(number), self.patience_seconds):
                self._pass_over(number)
                continue
            try:
                end = self._write(number, data, sync)
                if end is not None and not self._segments.is_closed(number):
                    return
            finally:
                self._segments.lock(number).unlink(missing_ok=True)
            # Another process has closed this segment, or is about to.
            self._segments.refresh()
            if self._segments.newest == number:
                self._segments.close(number, "the process that closed it did not create the next segment")
                self._segments.refresh()
            if end is not None and self._segments.counts(number, end):
                return

    def _pass_over(self, number: int) -> None:
        owner = owner_of(self._segments.lock(number)) or {}
        self._segments.close(number, f"process {owner.get('pid')} on {owner.get('host')} did not remove its lock")
        self._segments.refresh()

    def _write(self, number: int, data: bytes, sync: bool) -> int | None:
        """Append to a segment whose lock this process holds. Returns the segment's new length in bytes, or None if the
        segment is closed."""
        path = self._segments.path(number)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, FILE_MODE)
        except PermissionError:
            if self._segments.is_closed(number):
                return None
            raise
        try:
            found = os.fstat(fd)
            if not found.st_mode & WRITABLE:
                return None
            size = found.st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                data = TORN + data
            _write_all(fd, data)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)  # NFS sends the data to the server here, so this call may fail
        if sync and not size:
            fsync_directory(path.parent)
        return size + len(data)

    def _refused(self, error: OSError) -> RunDirectoryError:
        advice = ADVICE.get(error.errno or 0, "Check the file system")
        return RunDirectoryError(
            f"cannot write to the sweep's journal {self.path}: {error.strerror}. {advice}, "
            "then continue the sweep with `hpcaccel sweep resume`. Everything written before is intact"
        )


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
