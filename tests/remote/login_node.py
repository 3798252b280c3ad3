"""A login node on this machine: Debian's sshd on a loopback port, with its own keys and home directory.

The user who runs the tests logs in. ``HOME`` and ``PATH`` differ on the login node: Slurm, or its stand-in, is found
only there.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Cutting", "LoginNode", "make_key", "wait_for", "why_no_sshd"]

REPOSITORY = Path(__file__).resolve().parents[2]
HOLD = 'while [ -e "$HOME/hold" ]; do sleep 0.05; done'
"""Line of the login script that waits while the file exists."""
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def why_no_sshd() -> str | None:
    if SSHD is None:
        return "there is no sshd (Debian: openssh-server)"
    if shutil.which("ssh-keygen") is None:
        return "there is no ssh-keygen (Debian: openssh-client)"
    return None


def make_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class LoginNode:
    """Both sides of a connection, below ``root``: the login node's home and the client's."""

    root: Path
    port: int = field(default_factory=free_port)
    options: list[str] = field(default_factory=list)
    """Lines at the start of sshd_config, where the first value of an option counts."""
    path: str = ""
    """First entry of PATH on the login node."""
    env: dict[str, str] = field(default_factory=dict)
    """Further variables on the login node."""
    wrapper: Sequence[str] = ()
    """Command that executes sshd: the words before sshd's own."""

    def __post_init__(self) -> None:
        for folder in (self.home, self.client / ".ssh", self.client / "bin", self.root / "etc"):
            folder.mkdir(parents=True, mode=0o700)
        make_key(self.root / "etc" / "host_key")
        make_key(self.client / ".ssh" / "id_ed25519")
        shutil.copy(self.client / ".ssh" / "id_ed25519.pub", self.root / "etc" / "authorized_keys")
        self.known_hosts.write_text(self.known_line("host_key"))
        for name in ("git", "ssh", "ssh-keygen", "mount", "umount"):
            if (program := shutil.which(name)) is not None:
                (self.client / "bin" / name).symlink_to(program)
        self.write_config()
        self.write_profile()
        self.install()
        self._process: subprocess.Popen[bytes] | None = None

    home = property(lambda self: self.root / "home")
    client = property(lambda self: self.root / "client")
    known_hosts = property(lambda self: self.client / ".ssh" / "known_hosts")
    runs = property(lambda self: self.home / "runs")
    log = property(lambda self: self.root / "etc" / "sshd.log")

    def known_line(self, key: str) -> str:
        return f"[127.0.0.1]:{self.port} {(self.root / 'etc' / f'{key}.pub').read_text()}"

    def write_config(self, *lines: str) -> None:
        words = [
            "Host alps",
            "HostName 127.0.0.1",
            f"Port {self.port}",
            f"User {getpass.getuser()}",
            f"IdentityFile {self.client}/.ssh/id_ed25519",
            "IdentitiesOnly yes",
            f"UserKnownHostsFile {self.known_hosts}",
            *lines,
        ]
        (self.client / ".ssh" / "config").write_text("\n".join(words) + "\n")

    def write_profile(self, *lines: str, name: str = "alps", host: str = "alps") -> None:
        folder = self.client / ".config" / "hpcaccel" / "clusters"
        folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join([f"host: {host}", "runs_dir: ~/runs", *lines])
        (folder / f"{name}.yaml").write_text(text + "\n")

    def install(self, program: str | None = None) -> Path:
        """Write the program that ``cluster install`` creates on the login node."""
        place: Path = self.home / ".local" / "share" / "hpcaccel" / "env" / "bin" / "hpcaccel"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(program or f'#!/bin/sh\nexec {sys.executable} -W error -m hpcaccel "$@"\n')
        place.chmod(0o755)
        return place

    # -- the server ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        etc = self.root / "etc"
        there = {"HOME": str(self.home), "PYTHONPATH": str(REPOSITORY), **self.env}
        (self.home / ".profile").write_text(f'echo Welcome to alps\nexport PATH="{self.path}:/usr/bin:/bin"\n{HOLD}\n')
        lines = [
            *self.options,
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {etc}/host_key",
            f"AuthorizedKeysFile {etc}/authorized_keys",
            f"PidFile {etc}/sshd.pid",
            "StrictModes no",
            "UsePAM no",
            "PermitRootLogin yes",
            "MaxStartups 100",
            "PasswordAuthentication no",
            "LogLevel DEBUG2",
            "SetEnv " + " ".join(f'"{name}={value}"' for name, value in there.items()),
        ]
        (etc / "sshd_config").write_text("\n".join(lines) + "\n")
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True, mode=0o755)
        assert SSHD is not None
        words = [*self.wrapper, SSHD, "-D", "-f", str(etc / "sshd_config"), "-E", str(self.log)]
        self._process = subprocess.Popen(words)
        deadline = time.monotonic() + 20
        while "Server listening" not in (self.log.read_text() if self.log.exists() else ""):
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "sshd does not listen"
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self.cut()
            self._process.terminate()
            self._process.wait()
            self._process = None

    def connections(self) -> list[int]:
        """The sshd processes, one per connection."""
        assert self._process is not None
        return _children(self._process.pid)

    def cut(self) -> int:
        """Kill the sshd processes of all connections. Returns the number of killed processes."""
        killed = 0
        for pid in self.connections():
            for one in [*_children(pid, named="sshd"), pid]:
                try:
                    os.kill(one, signal.SIGKILL)
                    killed += 1
                except ProcessLookupError:
                    pass
        return killed

    def sessions(self) -> int:
        """Number of programs started on the login node over all connections."""
        said: str = self.log.read_text()
        return said.count("Starting session")

    def _has_session(self, pid: int) -> bool:
        """Whether a program was started on the login node over a connection of this process, not of another client."""
        started = [line for line in self.log.read_text().splitlines() if "Starting session" in line]
        return any(f" port {port} " in line for port in _connected_ports(pid, self.port) for line in started)

    def jobs(self) -> list[list[str]]:
        """Jobs of the stand-in queue: number, script, state, and the secret in sbatch's environment."""
        lines = (Path(self.env["STAND_IN_QUEUE"]) / "jobs").read_text().splitlines()
        return [line.split("\t") for line in lines]

    def programs(self) -> list[int]:
        """The ``answer`` processes of hpcaccel on the login node."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
                if b"answer" in words and f"HOME={self.home}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def kill_programs(self) -> None:
        for pid in self.programs():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def strike(self, victim: str, process: subprocess.Popen[str]) -> None:
        """Kill the client (``here``), its ``answer`` process (``there``) or ``both``, or cut the ``connection``."""
        if victim in ("here", "both"):
            process.kill()
        if victim in ("there", "both"):
            self.kill_programs()
        if victim == "connection":
            self.cut()

    def project(self, *, lines: Sequence[str] = (), files: Mapping[str, bytes] | None = None) -> Path:
        """Write a spec file and its code on the client."""
        folder: Path = self.client / "project"
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text("import hpcaccel\nprint('trained', flush=True)\n")
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content)
        text = ["name: toy", "entrypoint: {script: train.py}", "slurm: {time: '10:00', partition: gpu}", *lines]
        (folder / "job.yaml").write_text("\n".join(text) + "\n")
        return folder / "job.yaml"

    # -- the client ----------------------------------------------------------------------------------------------------

    def environment(self, **more: str) -> dict[str, str]:
        """The client's environment, without Slurm, an SSH agent or the tests' own home."""
        return {
            "HOME": str(self.client),
            "PATH": str(self.client / "bin"),
            "PYTHONPATH": str(REPOSITORY),
            "LC_ALL": "C.UTF-8",
            **more,
        }

    def start_command(self, *args: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "hpcaccel", *args],
            env=self.environment(**more), cwd=self.client, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def hpcaccel(self, *args: str, code: int | None = 0, **more: str) -> subprocess.CompletedProcess[str]:
        return self._ended(self.start_command(*args, **more), args, code)

    def hpcaccel_cut(self, *args: str, code: int | None = 0, **more: str) -> subprocess.CompletedProcess[str]:
        """Like ``hpcaccel``, with the connection cut once while the login shell starts."""
        hold = self.home / "hold"
        hold.touch()
        process = self.start_command(*args, **more)
        wait_for(lambda: self._has_session(process.pid) or process.poll() is not None, "a session")
        cut = self.cut()
        hold.unlink()
        ended = self._ended(process, args, code)
        assert cut, f"{args}: there was no connection to cut"
        assert "; retrying" in ended.stderr
        return ended

    @staticmethod
    def _ended(
        process: subprocess.Popen[str], args: Sequence[str], code: int | None
    ) -> subprocess.CompletedProcess[str]:
        out, err = process.communicate(timeout=300)
        assert code is None or process.returncode == code, f"{args}: {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(args, process.returncode, out, err)


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"{what}: it never came"
        time.sleep(0.02)


def _children(pid: int, named: str | None = None) -> list[int]:
    try:
        found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [one for one in found if named is None or named in Path(f"/proc/{one}/comm").read_text()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _connected_ports(pid: int, server_port: int) -> list[int]:
    """Local ports of a process's IPv4 connections to a port of this machine."""
    try:
        opened = {os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()}
    except (FileNotFoundError, PermissionError):
        return []
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [
        int(row[1].partition(":")[2], 16)
        for row in rows
        if int(row[2].partition(":")[2], 16) == server_port and f"socket:[{row[9]}]" in opened
    ]


class Cutting:
    """A connection that is cut once, by killing the server's sshd, after a number of bytes in one direction.
    Bytes read beyond that number are lost.

    Args:
        reads, writes: number of bytes before the cut; None: no cut.
    """

    def __init__(
        self, node: LoginNode, connection: Any, *, reads: int | None = None, writes: int | None = None
    ) -> None:
        self.node, self.connection = node, connection
        self.left = {"read": reads, "write": writes}
        self.cuts = 0

    def start(self, command: str) -> Any:
        return _CuttingSession(self, self.connection.start(command))

    def terminal(self, command: str) -> int:
        return int(self.connection.terminal(command))

    def close(self) -> None:
        self.connection.close()

    def count(self, direction: str, size: int) -> int:
        """How many of ``size`` bytes pass."""
        left = self.left[direction]
        if left is None:
            return size
        self.left[direction] = left - size
        if left - size <= 0:
            self.left[direction] = None
            self.cuts += self.node.cut() > 0
        return min(size, left)


class _CuttingSession:
    def __init__(self, cutting: Cutting, session: Any) -> None:
        self._cutting, self._session, self._over = cutting, session, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def read(self, count: int) -> bytes:
        if self._over:
            return b""
        data: bytes = self._session.read(count)
        passing = data[: self._cutting.count("read", len(data))]
        self._over = len(passing) < len(data)
        return passing

    def write(self, data: bytes) -> None:
        self._session.write(data)
        self._cutting.count("write", len(data))
