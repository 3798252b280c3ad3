"""What a cluster is (Options), what of it is running (State), and the one file in its root that says so."""

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
    """What can be asked for. Times in seconds, memory in MB."""

    name: str = "dev"
    nodes: int = 4
    prefix: str = ""
    """Node names are prefix + number; empty: chosen so that no other cluster on this machine has it."""
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
    """By role: munged, mariadbd, slurmdbd, slurmctld, and each node by its name."""
    failed: list[str] = dataclasses.field(default_factory=list)
    """Roles ended on purpose by `fail`."""
    slurm_folders: tuple[str, ...] = ()
    """Where its Slurm is, if that is not the system's own."""
    pyxis: str = ""
    """The prefix of pyxis and enroot; empty: without containers."""
    ready: bool = False
    """False from the first process to the last idle node, and again while going down."""

    @property
    def nodes(self) -> list[str]:
        return [f"{self.options.prefix}{i}" for i in range(1, self.options.nodes + 1)]

    @property
    def controller(self) -> str:
        return f"{self.options.prefix}ctl"

    @property
    def slurm_conf(self) -> Path:
        """SLURM_CONF for people and their programs."""
        return self.root / "etc" / "slurm.conf"

    @property
    def daemons_conf(self) -> Path:
        """SLURM_CONF for the daemons, and so for what they start; beside it, Slurm looks for gres.conf and the like."""
        return self.root / "etc" / "daemons" / "slurm.conf"

    @property
    def folders(self) -> tuple[str, ...]:
        """What people and their jobs have in front of PATH: this Slurm's programs and enroot's."""
        enroot = (f"{self.pyxis}/bin",) if self.pyxis else ()
        return (*self.slurm_folders, *enroot)

    @property
    def login_scripts(self) -> Path:
        """What the nodes have as /etc/profile.d, where login shells would not find this Slurm by themselves."""
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
    """The recorded state; None where there is no cluster."""
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
            f"{path} cannot be read: {error!r}. It names the processes of a cluster, so nothing can be ended without "
            f"it. Once none of them is left, delete {root}"
        ) from error


def is_root(root: Path) -> bool:
    """Whether `up` has ever made this directory a cluster's root: nothing else may be emptied."""
    return (root / LOCK_FILE).is_file()


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """One `up`, `down`, `fail` or `restore` at a time for a root. The lock ends with its process, however that ends."""
    fd = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
