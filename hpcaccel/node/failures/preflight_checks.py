"""The preflight checks of one node: GPUs, disk, and the connection to rank 0's node. Standard library only.

A check that is not possible (no nvidia-smi, a kernel log that users cannot read) yields no finding.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpcaccel.core.durable_files import file_system
from hpcaccel.node.failures.disk_space import fsync

__all__ = ["TOKEN", "WHERE", "check_node", "check_shared", "print_findings", "serve_connection_test"]

WHERE, TOKEN = "HPCACCEL_PREFLIGHT_WHERE", "HPCACCEL_PREFLIGHT_TOKEN"
"""Environment variables: ``host:port`` at which the batch step listens, and the token that each node sends there."""

SMI_SECONDS = 20.0
"""Time limit for nvidia-smi, which takes a second or two per GPU if the driver is not kept loaded, and may hang."""
CONNECT_SECONDS = 5.0
LEAST_BYTES = 16 << 20
"""Free space that the temporary directory must have."""
_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "cifs", "smb", "panfs", "wekafs", "pvfs", "afs", "9p")
"""Prefixes of the types of network file systems."""
_TEMPORARY = "the temporary directory"
RECENT_SECONDS = 3600
"""Xids older than this are ignored: a reset may have fixed their cause, and the kernel's log does not show resets."""

_HARDWARE_XIDS = {48, 62, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143}
"""Xids that, according to NVIDIA's list, no user program can cause."""
_XID = re.compile(
    r"^\[ *(?P<at>\d+\.\d+)\] NVRM: Xid \((?:PCI:)?(?P<bus>[0-9A-Fa-f:.]+)\): (?P<number>\d+), *(?P<text>.*)"
)
_BROKEN = re.compile(r"lost|requires reset|Unknown Error|ERR!", re.IGNORECASE)
"""Texts in nvidia-smi's values that indicate a broken GPU."""
_GPU_FIELDS = "index,pci.bus_id,ecc.errors.uncorrected.volatile.total,retired_pages.pending"
_ROW_FIELDS = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"


def print_findings(run_dir: Path) -> int:
    """Print the node's name and its findings as one JSON line. Returns exit code 0."""
    line = {
        "node": _node_name(),
        "findings": list(check_node(run_dir, os.environ)),
        "shared": list(check_shared(run_dir, os.environ)),
    }
    os.write(1, json.dumps(line).encode() + b"\n")  # in one write: srun merges the output of all nodes
    return 0


def check_node(run_dir: Path, env: Mapping[str, str], *, local: bool = False) -> Iterator[str]:
    """Check this node. Yields a message for each problem."""
    if not local:
        yield from _gpus(env)
        yield from _way_to_rank_0(env)
    if not _is_shared(temporary := _temporary(env), run_dir):
        yield from _disk(temporary, _TEMPORARY)


def check_shared(run_dir: Path, env: Mapping[str, str]) -> Iterator[str]:
    """Check the shared file systems from this node. A problem that all nodes report is no node's fault."""
    yield from _writable(run_dir, "the run directory")
    if _is_shared(temporary := _temporary(env), run_dir):
        yield from _disk(temporary, _TEMPORARY)


def _node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


# -- GPUs ---------------------------------------------------------------------------------------------------------


def _gpus(env: Mapping[str, str]) -> Iterator[str]:
    requested = env.get("SLURM_GPUS_ON_NODE", "")
    if not requested.isdigit() or requested == "0" or shutil.which("nvidia-smi", path=env.get("PATH")) is None:
        return
    try:
        yield from _driver_findings(int(requested), env)
    except subprocess.TimeoutExpired:
        yield f"nvidia-smi did not respond within {SMI_SECONDS:g} s"


def _driver_findings(requested: int, env: Mapping[str, str]) -> Iterator[str]:
    queries = [_start_smi(f"--query-gpu={_GPU_FIELDS}"), _start_smi(f"--query-remapped-rows={_ROW_FIELDS}")]
    end = time.monotonic() + SMI_SECONDS
    try:
        (code, gpus, output), rows = (_result(query, end) for query in queries)
    finally:
        for query in queries:
            _give_up(query)
    if code and not _is_old_driver(output):
        yield f"nvidia-smi exited with code {code}: {output.strip()[:300]}"
        return
    if not code:
        ours = _ours(gpus, requested, env)
        if len(ours) < requested:
            yield f"GPUs listed by nvidia-smi: {len(ours)} of {requested}"
        yield from _faults(ours)
        buses = {cells[1].lower() for cells in ours}
        yield from _row_faults(rows, buses)
        yield from _xids(buses)


def _start_smi(query: str) -> subprocess.Popen[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=-1, stderr=subprocess.STDOUT, text=True)


def _give_up(query: subprocess.Popen[str]) -> None:
    """Kill ``query`` if it is still running. Wait at most one second for its end, because a process that hangs in the
    driver cannot be killed."""
    query.kill()
    assert query.stdout is not None
    query.stdout.close()
    try:
        query.wait(timeout=1)
    except subprocess.TimeoutExpired:
        pass


def _result(query: subprocess.Popen[str], end: float) -> tuple[int, list[list[str]], str]:
    text, _ = query.communicate(timeout=max(0.1, end - time.monotonic()))
    return query.returncode, [[cell.strip() for cell in line.split(",")] for line in text.splitlines()], text


def _is_old_driver(output: str) -> bool:
    return "not a valid field" in output or "nvalid combination of input" in output


def _ours(gpus: list[list[str]], requested: int, env: Mapping[str, str]) -> list[list[str]]:
    """The job's own GPUs: all that nvidia-smi lists, or those in CUDA_VISIBLE_DEVICES if it also lists other GPUs."""
    found = [cells for cells in gpus if len(cells) == 4]
    numbers = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(found) <= requested or not all(number.isdigit() for number in numbers):
        return found
    return [cells for cells in found if cells[0] in numbers]


def _faults(gpus: list[list[str]]) -> Iterator[str]:
    for index, bus, uncorrected, pending in gpus:
        name = f"GPU {index} ({bus})"
        if broken := next((cell for cell in (index, bus, uncorrected, pending) if _BROKEN.search(cell)), None):
            yield f"{name}: {broken.strip('[]')}"
        elif uncorrected.isdigit() and uncorrected != "0":
            yield f"{name}: uncorrectable ECC errors since the driver was loaded: {uncorrected}"
        elif pending.lower() == "yes":
            yield f"{name}: a memory page is pending retirement; the GPU needs a reset"


def _row_faults(result: tuple[int, list[list[str]], str], buses: set[str]) -> Iterator[str]:
    """Yield problems with row remapping, a mechanism by which GPUs since Ampere replace faulty memory rows."""
    for bus, pending, failure in (cells for cells in result[1] if len(cells) == 3 and not result[0]):
        if bus.lower() in buses and failure.lower() in ("1", "yes"):
            yield f"GPU {bus}: a memory row could not be remapped"
        elif bus.lower() in buses and pending.lower() in ("1", "yes"):
            yield f"GPU {bus}: a memory row is pending remapping; the GPU needs a reset"


def _xids(buses: set[str]) -> Iterator[str]:
    """Yield the hardware Xids of the last hour, if the kernel's log is readable."""
    if shutil.which("dmesg") is None:
        return
    log = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=SMI_SECONDS, check=False)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    for line in log.stdout.splitlines():
        match = _XID.match(line)
        if match is None or int(match["number"]) not in _HARDWARE_XIDS or now - float(match["at"]) > RECENT_SECONDS:
            continue
        # The kernel writes 0000:3b:00, nvidia-smi 00000000:3B:00.0
        if any(match["bus"].lower() in bus for bus in buses):
            yield f"GPU {match['bus']}: Xid {match['number']}, {match['text'].strip()[:200]}"


# -- disk and network ---------------------------------------------------------------------------------------------


def _temporary(env: Mapping[str, str]) -> Path:
    return Path(env.get("TMPDIR") or "/tmp")


def _is_shared(folder: Path, run_dir: Path) -> bool:
    """Whether ``folder`` is on the run directory's file system or on any network file system, see proc(5)."""
    try:
        device = folder.stat().st_dev
        if device == run_dir.stat().st_dev:
            return True
    except OSError:
        return False
    return (file_system(device) or "").startswith(_NETWORK)


def _writable(folder: Path, called: str) -> Iterator[str]:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(4096))
            file.flush()
            fsync(file.fileno())
    except OSError as error:
        yield f"cannot write to {called} {folder}: {error.strerror}"


def _disk(folder: Path, called: str) -> Iterator[str]:
    findings = list(_writable(folder, called))
    yield from findings
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    if not findings and free < LEAST_BYTES:
        yield f"{called} {folder} has only {free >> 20} MiB free (required: {LEAST_BYTES >> 20})"


def _way_to_rank_0(env: Mapping[str, str]) -> Iterator[str]:
    host, _, port = env.get(WHERE, "").rpartition(":")
    if not host:
        return
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as way:
            way.settimeout(CONNECT_SECONDS)
            way.sendall(env[TOKEN].encode())
            if way.recv(64) != b"ok":
                yield f"another program is listening at {host}:{port}"
    except socket.gaierror:
        yield f"the host name of rank 0's node, {host!r}, cannot be resolved here"
    except OSError as error:
        yield f"cannot connect to rank 0's node {host}: {error.strerror or error}"


@contextmanager
def serve_connection_test(nodes: Sequence[str]) -> Iterator[dict[str, str]]:
    """Listen on a port of rank 0's node, as the ranks' store will, and reply to connections that send the token.

    Yields the environment variables for the checks. No port is opened, and the mapping is empty, if the batch step is
    not on rank 0's node or there is only one node.
    """
    if os.environ.get("SLURMD_NODENAME", nodes[0]) != nodes[0] or len(nodes) == 1:
        yield {}
        return
    token = os.urandom(16).hex()
    with socket.create_server(("", 0), backlog=1024) as door:
        threading.Thread(target=_receive, args=(door, token.encode()), daemon=True).start()
        try:
            yield {WHERE: f"{nodes[0]}:{door.getsockname()[1]}", TOKEN: token}
        finally:
            door.shutdown(socket.SHUT_RDWR)  # wakes the thread, which then ends


def _receive(door: socket.socket, token: bytes) -> None:
    while True:
        try:
            guest, _ = door.accept()
        except OSError:
            return
        with guest:
            try:
                guest.settimeout(1.0)
                if hmac.compare_digest(guest.recv(64), token):
                    guest.sendall(b"ok")
            except OSError:
                continue
