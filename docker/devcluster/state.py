"""Settings of a cluster (Options), its running processes (State), and the file in its root that records them."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import DevClusterError
from .processes import Process

STATE_FILE = "cluster.json"
LOCK_FILE = "cluster.lock"


@dataclass(frozen=True)
class Options:
    """Options of `up`. Times in seconds, memory in MB."""

    name: str = "dev"
    nodes: int = 4
    prefix: str = ""
    """Node names are this prefix and a number. If it is empty, a free prefix is chosen."""
    gpus: int = 2
    cpus: int = 16
    memory_mb: int = 20000
    grace_seconds: int = 30
    kill_wait_seconds: int = 10
    slurmd_timeout_seconds: int = 30


@dataclass(frozen=True)
class Ports:
    slurmctld: int
    slurmdbd: int
    slurmd: tuple[int, ...]

    def all(self) -> set[int]:
        return {self.slurmctld, self.slurmdbd, *self.slurmd}


@dataclass
class State:
    root: Path
    options: Options
    ports: Ports
    processes: dict[str, Process] = dataclasses.field(default_factory=dict)
    """By role: munged, mariadbd, slurmdbd, slurmctld, and each node's name."""
    failed: list[str] = dataclasses.field(default_factory=list)
    """Roles stopped by `fail`."""
    slurm_folders: tuple[str, ...] = ()
    """Directories of the cluster's Slurm; empty if that is the system's."""
    pyxis: str = ""
    """The prefix of pyxis and enroot; empty for a cluster without containers."""
    ready: bool = False
    """False until all nodes are up, and again while the cluster is being stopped."""

    @property
    def nodes(self) -> list[str]:
        return [f"{self.options.prefix}{i}" for i in range(1, self.options.nodes + 1)]

    @property
    def controller(self) -> str:
        return f"{self.options.prefix}ctl"

    @property
    def slurm_conf(self) -> Path:
        """SLURM_CONF for users and their programs."""
        return self.root / "etc" / "slurm.conf"

    @property
    def daemons_conf(self) -> Path:
        """SLURM_CONF for the daemons and their children; Slurm looks for gres.conf etc. next to it."""
        return self.root / "etc" / "daemons" / "slurm.conf"

    @property
    def folders(self) -> tuple[str, ...]:
        """Directories prepended to PATH for users and jobs: this Slurm's programs and enroot's."""
        enroot = (f"{self.pyxis}/bin",) if self.pyxis else ()
        return (*self.slurm_folders, *enroot)

    @property
    def login_scripts(self) -> Path:
        """The nodes' /etc/profile.d, through which login shells find this Slurm."""
        return self.root / "etc" / "profile.d"

    def save(self) -> None:
        path = self.root / STATE_FILE
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump({**dataclasses.asdict(self), "root": str(self.root)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)

    def forget(self) -> None:
        (self.root / STATE_FILE).unlink(missing_ok=True)


def load(root: Path) -> State | None:
    """The recorded state; None if there is no cluster."""
    path = root / STATE_FILE
    try:
        data = json.loads(path.read_text())
        return State(
            root=root,
            options=Options(**data["options"]),
            ports=Ports(**{**data["ports"], "slurmd": tuple(data["ports"]["slurmd"])}),
            processes={role: Process(**process) for role, process in data["processes"].items()},
            failed=data["failed"],
            slurm_folders=tuple(data.get("slurm_folders", ())),
            pyxis=data.get("pyxis", ""),
            ready=data["ready"],
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DevClusterError(
            f"{path} cannot be read: {error!r}. `down` needs it to stop the cluster's processes: stop "
            f"them by hand, then delete {root}"
        ) from error


def is_root(root: Path) -> bool:
    """Whether this directory has been a cluster's root: no other directory may be emptied."""
    return (root / LOCK_FILE).is_file()


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Lock: one `up`, `down`, `fail` or `restore` at a time per root. The lock is also released if the process dies."""
    fd = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
