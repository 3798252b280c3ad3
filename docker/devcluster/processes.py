"""Processes that this program started: how they are recorded, recognised after a crash, and ended.

A pid alone is ambiguous, because pids are reused. A pid with the process's start time and the machine's boot id stands
for one process for ever, and a pidfd opened before these are compared cannot refer to another process afterwards.

Every daemon runs in a UTS namespace of its own, with the host name of its node or of the controller. A slurmd's job
step daemons and their tasks inherit the namespace, whatever their parent, session and environment, and are found by it.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """Unique identity of a process: `start_ticks` is its start in clock ticks since the boot `boot_id`."""

    role: str
    pid: int
    start_ticks: int
    boot_id: str
    uts: str
    """The UTS namespace, as in /proc/<pid>/ns/uts."""


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start(
    role: str,
    command: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str],
    record: Callable[[Process], None],
    hostname: str,
    mounts: Sequence[tuple[Path, Path]] = (),
) -> None:
    """Start `command` in a session of its own, in a new UTS namespace with the host name `hostname`.

    `mounts`: pairs of a folder and the place where it is mounted, in a mount namespace of the process's own. The child
    execs `command` only after `record` has returned. If this process is killed before that, the child reads the end of
    its standard input and exits, so that no unrecorded process is left.
    """
    binds = "".join(f"mount --bind {shlex.quote(str(here))} {shlex.quote(str(there))} && " for here, there in mounts)
    prepare = binds + 'hostname "$0" && read -r go && exec "$@" </dev/null'
    namespaces = ["--uts", *(["--mount", "--propagation=slave"] if mounts else [])]
    argv = ["unshare", *namespaces, "sh", "-c", prepare, hostname, *command]
    with log.open("ab") as out:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=dict(env),
            cwd="/",
            start_new_session=True,
            umask=0o022,
        )
    assert child.stdin is not None
    _wait_for_namespace(child)
    record(Process(role, child.pid, _start_ticks(child.pid) or 0, boot_id(), _uts(child.pid) or ""))
    with child.stdin as go:
        go.write(b"\n")


def _wait_for_namespace(child: subprocess.Popen[bytes]) -> None:
    """Wait until `unshare` has moved the child out of this process's own UTS namespace."""
    own = _uts(os.getpid())
    deadline = time.monotonic() + 5
    while _uts(child.pid) == own and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


def is_alive(process: Process) -> bool:
    """Whether the process runs; a zombie does not."""
    return process.boot_id == boot_id() and _start_ticks(process.pid) == process.start_ticks


def send(processes: Sequence[Process], sig: signal.Signals) -> None:
    """Send `sig` to each that is alive."""
    for fd in filter(None, map(_open, processes)):
        try:
            _send(fd, sig)
        finally:
            os.close(fd)


def end(processes: Sequence[Process], sig: signal.Signals, *, patience_seconds: float) -> None:
    """Send `sig` to each, wait for all of them together, and kill the remaining ones after `patience_seconds`."""
    handles = [fd for fd in map(_open, processes) if fd is not None]
    try:
        for fd in handles:
            _send(fd, sig)
        left = _wait(handles, patience_seconds)
        for fd in left:
            _send(fd, signal.SIGKILL)
        if stuck := _wait(left, 10):
            raise TimeoutError(f"{len(stuck)} of {len(handles)} processes are still alive 10 s after SIGKILL")
    finally:
        for fd in handles:
            os.close(fd)


def descendants(daemons: Iterable[Process], hostnames: Iterable[str]) -> list[Process]:
    """Every other process in the namespaces of `daemons`: job step daemons, tasks, and whatever those left behind.

    The kernel reuses a namespace's number once the namespace is gone, so its host name must be in `hostnames`, too.
    """
    this_boot = boot_id()
    records = [daemon for daemon in daemons if daemon.boot_id == this_boot]
    known = {daemon.uts: daemon.start_ticks for daemon in records}
    known.pop(_uts(os.getpid()) or "", None)
    own_pids = {daemon.pid for daemon in records if is_alive(daemon)}
    names = set(hostnames)
    hostname_of: dict[str, str] = {}
    found = []
    for pid in _all_pids():
        uts, ticks = _uts(pid), _start_ticks(pid)
        if uts not in known or ticks is None or pid in own_pids or ticks < known[uts]:
            continue
        if hostname_of.setdefault(uts, hostname_of.get(uts) or _hostname_in(pid)) in names:
            found.append(Process(role="job", pid=pid, start_ticks=ticks, boot_id=this_boot, uts=uts))
    return found


def _hostname_in(pid: int) -> str:
    """The host name in a process's UTS namespace; empty if the process has just exited."""
    answer = subprocess.run(["nsenter", "-t", str(pid), "-u", "hostname"], capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _uts(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/uts")
    except OSError:  # gone, or a zombie
        return None


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may contain spaces and parentheses; state is field 3 and starttime field 22, proc(5).
    match = re.fullmatch(r"\d+ \(.*\) (.*)", stat.strip(), re.DOTALL)
    if match is None:
        return None
    fields = match[1].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _open(process: Process) -> int | None:
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if is_alive(process):
        return fd
    os.close(fd)
    return None


def _send(fd: int, sig: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(fd, sig)
    except ProcessLookupError:
        return  # it ended in the meantime, which is what we want


def _wait(handles: Sequence[int], patience_seconds: float) -> list[int]:
    """Processes that have not ended in time. A pidfd becomes readable when its process ends."""
    left = list(handles)
    deadline = time.monotonic() + patience_seconds
    while left and (remaining := deadline - time.monotonic()) > 0:
        ended, _, _ = select.select(left, [], [], remaining)
        left = [fd for fd in left if fd not in ended]
    return left
