"""Files of the queue cache: their location, the lock of the process that queries Slurm, the time of the last change.

The files are in the user's state folder and private to the user. Several clusters may share a home directory and use
the same job ids for different jobs, so each cluster has its own files. slurm.conf identifies the cluster without a
query: it has the same lines on login nodes and compute nodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.core.durable_files import atomic_write, lock_file
from hpcaccel.core.run_dir import state_home

__all__ = ["QueueCacheFiles", "cluster_key", "note_change", "query_turn", "shared_files"]

_IDENTIFYING = ("clustername", "controlmachine", "slurmctldhost", "slurmctldport", "statesavelocation")
"""Keys of slurm.conf(5) whose values differ between clusters. SlurmctldHost was called ControlMachine before 18.08."""
_USUAL_PATHS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf")
"""Usual paths of slurm.conf. slurmd writes the second one on a node without its own file ("configless")."""
LOOK_SECONDS = 0.2
"""Interval at which a waiting process tries the lock."""
STUCK_SECONDS = 150.0
"""Age after which a held lock is ignored: queries rarely take so long, and the holder may be suspended (Ctrl-Z)."""


@dataclass(frozen=True)
class QueueCacheFiles:
    """The files that all processes of one user share for one cluster."""

    folder: Path
    key: str

    @property
    def answer(self) -> Path:
        """The cache; see ``queue_cache_contents.CacheFile``."""
        return self.folder / f"{self.key}.json"

    @property
    def lock(self) -> Path:
        """The file that the process that queries Slurm locks."""
        return self.folder / f"{self.key}.lock"

    @property
    def change(self) -> Path:
        """File with the time of the last change that hpcaccel made to this user's queue; older results are outdated."""
        return self.folder / f"{self.key}.changed"

    def changed(self) -> float:
        """Time of the last change in seconds since the epoch; 0.0 if there is none."""
        try:
            return float(self.change.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0.0


def shared_files() -> QueueCacheFiles | None:
    """The files of this user and cluster. Creates their folder; returns None if that fails or it is another user's."""
    folder = state_home() / "hpcaccel" / "queue"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
        if found.st_uid != os.geteuid():
            return None
        if found.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError:
        return None
    return QueueCacheFiles(folder, cluster_key())


def note_change() -> None:
    """Record that the queue has changed. Without a writable folder the last result remains valid until it expires."""
    if (files := shared_files()) is not None:
        with contextlib.suppress(OSError):
            atomic_write(files.change, repr(time.time()), mode=0o600, sync=False)


@contextmanager
def query_turn(lock: Path, *, has_result: Callable[[], bool], patience_seconds: float) -> Iterator[bool]:
    """Wait for the lock, so that only one of the processes that need a new result queries Slurm.

    The lock is an flock, which is released when its holder exits. On a file system without flock every process runs its
    own query.

    Args:
        has_result: returns whether another process has stored a usable result.
        patience_seconds: longest wait for the lock.

    Yields:
        True if this process is to query Slurm; False if another process has stored a result, or the wait timed out.
    """
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield True
        return
    try:
        yield _wait(fd, has_result, patience_seconds)
    finally:
        os.close(fd)


def _wait(fd: int, has_result: Callable[[], bool], patience_seconds: float) -> bool:
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            state = lock_file(fd, wait=False)
        except OSError:
            return True
        if state != "busy":
            if state == "held":
                _note_turn(fd)
            return True
        if has_result():
            return False
        if _held_since(fd) < time.time() - STUCK_SECONDS:
            _note_turn(fd)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_SECONDS * random.uniform(0.5, 1.5))  # jitter: many processes must not try at the same time


def _note_turn(fd: int) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, repr(time.time()).encode(), 0)


def _held_since(fd: int) -> float:
    try:
        return float(os.pread(fd, 64, 0))
    except ValueError:
        return time.time()  # the holder has not written the time yet


def cluster_key() -> str:
    """File name for the cluster that Slurm's commands on this machine use, such as ``alps-1f3c9a20``."""
    for path in _configurations():
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if lines := sorted(_identifying_lines(text)):
            name = next((line.partition("=")[2] for line in lines if line.startswith("clustername=")), "cluster")
            return _key(name, lines)
    return _key(socket.gethostname(), [os.environ.get("SLURM_CONF", ""), shutil.which("squeue") or ""])


def _configurations() -> Iterator[Path]:
    if named := os.environ.get("SLURM_CONF"):
        yield Path(named)
        return  # in this case Slurm reads no other file
    if (squeue := shutil.which("squeue")) is not None:
        prefix = Path(os.path.realpath(squeue)).parent.parent
        if prefix != Path("/usr"):
            yield from (prefix / "etc" / "slurm.conf", prefix / "etc" / "slurm" / "slurm.conf")
    yield from map(Path, _USUAL_PATHS)


def _identifying_lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        key, equals, value = line.partition("#")[0].partition("=")
        if equals and key.strip().lower() in _IDENTIFYING:
            yield f"{key.strip().lower()}={value.strip()}"


def _key(name: str, lines: list[str]) -> str:
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9.-]', '_', name)[:40]}-{digest}"
