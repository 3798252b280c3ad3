"""Folders of snapshots in the shared memory of a node: creation, locks, removal. Does not import torch.

``/dev/shm/hpcaccel-<uid>/<run>/<node>/`` holds a run's snapshots on one node, with the parts of the node's ranks, and
with the replicas that another node has sent. ``<run>`` is the run directory's name and a hash of its path. The folders
belong to one user (mode 700). While ranks of the run live, they hold a shared lock on ``<run>/lock``.

The folder of a run outlives its ranks and even its job: ``remove`` deletes it at the run's end, and ``remove_stale``
deletes the folders of runs that ended without ``remove``.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import time
from pathlib import Path

from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.run_ledger import RunLedger
from hpcaccel.errors import CheckpointError

__all__ = ["SnapshotFolder", "remove", "remove_stale"]

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
ABANDONED_SECONDS = 3600.0
"""A run that has neither ended nor been paused counts as over if its snapshots have not changed for this long: its
supervisor was killed, or its requeued job is still pending."""


def _user_folder() -> Path:
    return SHARED_MEMORY / f"hpcaccel-{os.getuid()}"


def _run_folder(run: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(run.absolute())).hexdigest()[:16]
    return _user_folder() / f"{run.name}-{digest}"


class SnapshotFolder:
    """One node's folder of a run's snapshots; created by the constructor, and locked while this object exists.

    Args:
        run: the run directory.
        node: the node's name.

    Raises:
        CheckpointError: the folder cannot be created, or belongs to another user.
    """

    def __init__(self, run: Path, node: str) -> None:
        self.run = _run_folder(run)
        self.path = self.run / node
        self._lock = -1
        try:
            self._create(run)
        except OSError as error:
            raise CheckpointError(f"cannot create {self.path}: {error.strerror or error}") from None

    def _create(self, run: Path) -> None:
        while True:
            for folder in (_user_folder(), self.run, self.path):
                _make_private(folder)
            lock = os.open(self.run / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_same_file(lock, self.run / "lock") and self.path.is_dir():
                break
            os.close(lock)  # another job has just removed the folder as a stale one
        self._lock = lock
        write_json(self.run / "owner.json", {"run": str(run.absolute())}, sync=False)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _make_private(folder: Path) -> None:
    """Create a folder that only this user can use.

    Raises:
        CheckpointError: it exists and is not such a folder.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise CheckpointError(
                f"{folder} exists and is not a private directory of this user (owner {found.st_uid}, mode "
                f"{stat.S_IMODE(found.st_mode):o}): remove it"
            ) from None


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def remove(run: Path) -> None:
    """Delete the snapshots of a run from this node's memory. A failure is logged."""
    _delete(_run_folder(run))


def remove_stale(*, besides: Path) -> None:
    """Delete this user's snapshots of runs that are over from this node's memory.

    Args:
        besides: the run directory of the caller's run.
    """
    own = _run_folder(besides)
    try:
        folders = [folder for folder in _user_folder().iterdir() if folder != own and folder.is_dir()]
    except OSError:
        return
    for folder in folders:
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            lock = -1  # killed while the folder was created, or while it was deleted
        try:
            if lock >= 0:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_over(folder):
                _delete(folder)
        except BlockingIOError:
            pass  # ranks of this run are alive
        finally:
            if lock >= 0:
                os.close(lock)


def _is_over(folder: Path) -> bool:
    """Whether a run without living ranks on this node has ended or is paused, or has not changed its snapshots for
    ``ABANDONED_SECONDS``."""
    owner = read_json(folder / "owner.json")
    changed = max((entry.stat().st_mtime for entry in [folder, *folder.iterdir()]), default=0.0)
    if time.time() - changed > ABANDONED_SECONDS:
        return True
    return owner is not None and not _continues(RunDir(owner["run"]))


def _continues(run: RunDir) -> bool:
    """Whether a supervisor works on a run, or the run will continue by itself: between the end of a requeued job and
    its next start, no supervisor holds the lease."""
    if run.lease.exists():
        return True
    ledger = RunLedger.read(run)
    return ledger.last is not None and ledger.settled is None


def _delete(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("cannot remove the snapshots in %s: %s", folder, error)
