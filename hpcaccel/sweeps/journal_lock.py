"""Who may append to a sweep's journal right now: one process, on whichever node.

The lock is a file that comes into being by link(2), which is exclusive on every shared file system. It is a second name
of the process's own *claim*, a small file that says who the process is, so that whoever waits can read whom it waits
for. Locks of the kernel (fcntl) would be let go when their holder dies, but on some mounts they hold on one node only
(NFS with ``nolock``, Lustre with ``localflock``, BeeGFS as it comes) and never say so.

A lock is never broken. A holder that is dead, or silent for too long, loses the *segment* of the journal that the lock
is for: ``journal_segments`` tells how, and why a holder that was only slow does no harm then.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
import weakref
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpcaccel.core.process_identity import process_start

__all__ = ["PATIENCE_SECONDS", "Claim", "is_dead", "owner_of"]

PATIENCE_SECONDS = 5.0
"""For how long a holder that cannot be seen to be dead (it is on another node, or is stopped) keeps the others waiting.
It holds the lock for milliseconds; passing over one that is only slow costs nothing but a file."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.0005, 0.05
LOOK_EVERY_SECONDS = 0.05
"""Who waits looks so often whether the holder lives."""


class Claim:
    """This process, in a file beside the journal, made when it is first needed and removed with this object, or when
    the process ends; and with it the files of this machine's processes that were killed meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._pid = 0
        self._token = ""

    def hold(self, lock: Path, patience_seconds: float) -> bool:
        """Wait for the lock and take it; False when whoever has it is dead, or has had it for too long.

        Raises:
            OSError: the folder cannot be written.
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
                    return True  # the answer to our link(2) was lost and the request sent again, as NFS may do
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
                self._path = None  # somebody tidied up: make it again, or say that the folder is gone

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
    """Who holds the lock, None where nobody does. Empty when the file says nothing.

    Opening, rather than stat(2), makes a client of NFS ask its server.
    """
    try:
        value = json.loads(lock.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def is_dead(owner: dict[str, Any] | None) -> bool:
    """Whether the process is known to be gone: seen from its own machine only, or after that has started anew."""
    if not owner:
        return False
    machine = _machine()
    if owner.get("machine") == machine:
        return bool(process_start(int(owner["pid"])) != owner["start"])
    rebooted = str(owner.get("machine")).partition(":")[0] != machine.partition(":")[0]
    return bool(rebooted and owner.get("host") == socket.gethostname())


@lru_cache(maxsize=1)
def _machine() -> str:
    """This boot of this machine, and the set of process ids that is seen here: a container may have its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{os.urandom(8).hex()}:"  # unlike any other: nobody is ever believed dead


def _leave(claim: Path, pid: int, host: str) -> None:
    """Of the process that made it; a forked child leaves it alone. Locks are names of their own, and stay."""
    if pid != os.getpid():
        return
    try:
        claim.unlink(missing_ok=True)
        _tidy(claim.parent, host)
    except OSError:
        pass  # files of a hundred bytes, which the next process of this machine removes


def _tidy(folder: Path, host: str) -> None:
    """Remove the claims of this machine's processes that were killed."""
    for path in folder.glob(f".journal-{host}-*.claim"):
        if is_dead(owner_of(path)):
            path.unlink(missing_ok=True)
