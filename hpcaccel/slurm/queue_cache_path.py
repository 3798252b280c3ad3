"""Where the shared answer of squeue lies: a file for each cluster, in the user's state folder and private to the user.

Several clusters may share a home directory, and their job ids mean different jobs. Which cluster this is says
slurm.conf, so that nothing has to be asked: its login nodes, and its compute nodes too, read the same lines there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcaccel.core.run_dir import atomic_write, state_home

__all__ = ["Place", "cluster_key", "note_change", "shared_place"]

_TELLING = ("clustername", "controlmachine", "slurmctldhost", "slurmctldport", "statesavelocation")
"""What of slurm.conf tells two clusters apart (slurm.conf(5)); ControlMachine is SlurmctldHost's name before 18.08."""
_USUAL = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/etc/slurm-llnl/slurm.conf")
"""The second one is that of a node without a file of its own ("configless"), as slurmd writes it."""


@dataclass(frozen=True)
class Place:
    """The files that the processes of one user share about one cluster."""

    folder: Path
    key: str

    @property
    def answer(self) -> Path:
        return self.folder / f"{self.key}.json"

    @property
    def lock(self) -> Path:
        """Held by the process that asks."""
        return self.folder / f"{self.key}.lock"

    @property
    def change(self) -> Path:
        """When something was changed last, by this clock: what Slurm said before does not count for who looks next."""
        return self.folder / f"{self.key}.changed"

    def changed(self) -> float:
        """Seconds since the epoch; 0.0 where nothing is known to have changed."""
        try:
            return float(self.change.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 0.0


def shared_place() -> Place | None:
    """Makes the folder. None where that cannot be had, or belongs to somebody else: then each process asks alone."""
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
    return Place(folder, cluster_key())


def note_change() -> None:
    """Remember that the queue is about to look different. Where that cannot be written, answers are believed longer."""
    if (place := shared_place()) is not None:
        with contextlib.suppress(OSError):
            atomic_write(place.change, repr(time.time()), mode=0o600, sync=False)


def cluster_key() -> str:
    """A file name for the cluster that Slurm's commands speak to from here, such as ``alps-1f3c9a20``."""
    for path in _configurations():
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if lines := sorted(_telling_lines(text)):
            name = next((line.partition("=")[2] for line in lines if line.startswith("clustername=")), "cluster")
            return _key(name, lines)
    return _key(socket.gethostname(), [os.environ.get("SLURM_CONF", ""), shutil.which("squeue") or ""])


def _configurations() -> Iterator[Path]:
    if named := os.environ.get("SLURM_CONF"):
        yield Path(named)
        return  # Slurm itself looks nowhere else then
    if (squeue := shutil.which("squeue")) is not None:
        prefix = Path(os.path.realpath(squeue)).parent.parent
        if prefix != Path("/usr"):
            yield from (prefix / "etc" / "slurm.conf", prefix / "etc" / "slurm" / "slurm.conf")
    yield from map(Path, _USUAL)


def _telling_lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        key, equals, value = line.partition("#")[0].partition("=")
        if equals and key.strip().lower() in _TELLING:
            yield f"{key.strip().lower()}={value.strip()}"


def _key(name: str, lines: list[str]) -> str:
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9.-]', '_', name)[:40]}-{digest}"
