"""The node names in /etc/hosts: the only trace of a cluster outside its root, and therefore the list of all clusters.

There is one line per cluster, marked with its root. All names have the address 127.0.0.1: Slurm's programs reply to the
address that a message came from, and on the loopback device that is 127.0.0.1 whichever 127.x.x.x was contacted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

HOSTS = Path("/etc/hosts")
_MARK = "# hpcaccel-cluster "


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Lock against other clusters that choose names and ports at the same time."""
    with HOSTS.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def add(names: Sequence[str], root: Path) -> None:
    """Add the line of the cluster in `root`. The caller must hold the lock."""
    content = HOSTS.read_bytes()
    line = f"127.0.0.1 {' '.join(names)} {_MARK}{root}\n".encode()
    with HOSTS.open("ab") as file:  # appended by one write: a reader sees all of it or nothing
        file.write(line if not content or content.endswith(b"\n") else b"\n" + line)


def remove(root: Path) -> None:
    """Remove the line of the cluster in `root`, if there is one. The caller must hold the lock."""
    old = HOSTS.read_bytes()
    mark = f"{_MARK}{root}\n".encode()
    new = b"".join(line for line in old.splitlines(keepends=True) if not line.endswith(mark))
    if new == old:
        return
    # Write in place, because in a container the file is a mount that cannot be replaced. The new, shorter text is
    # written before the file is truncated, so that no reader ever finds the file empty.
    fd = os.open(HOSTS, os.O_WRONLY)
    try:
        os.pwrite(fd, new, 0)
        os.ftruncate(fd, len(new))
    finally:
        os.close(fd)


def marked_roots() -> list[Path]:
    """The roots of all clusters with a line in the file."""
    lines = HOSTS.read_text().splitlines()
    return [Path(line.partition(_MARK)[2]) for line in lines if _MARK in line]


def taken_names() -> set[str]:
    """All host names in the file."""
    lines = (line.partition("#")[0] for line in HOSTS.read_text().splitlines())
    return {name for line in lines for name in line.split()[1:]}
