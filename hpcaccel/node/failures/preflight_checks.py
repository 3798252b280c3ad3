"""What one node says of itself before the ranks start there: GPUs, disk, and the way to rank 0. Standard library only.

What cannot be looked at (no nvidia-smi, a kernel log that is closed to users) is no finding.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcaccel.node.retry_io import fsync

__all__ = ["TOKEN", "WHERE", "check_node", "check_shared", "print_findings"]

WHERE, TOKEN = "HPCACCEL_PREFLIGHT_WHERE", "HPCACCEL_PREFLIGHT_TOKEN"
"""``host:port`` where the batch step answers, and the word that it answers to."""

SMI_SECONDS = 20.0
"""nvidia-smi needs a second or two per GPU where the driver is not kept loaded; a broken GPU lets it hang."""
CONNECT_SECONDS = 5.0
LEAST_BYTES = 16 << 20
_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "cifs", "smb", "panfs", "wekafs", "pvfs", "afs", "9p")
"""Types of file systems that are on no single node."""
_TEMPORARY = "the directory for temporary files"
RECENT_SECONDS = 3600
"""An Xid that is older may have been mended by a reset since, which the kernel's log does not tell."""

_HARDWARE_XIDS = {48, 62, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143}
"""Of NVIDIA's list those that no program can cause."""
_XID = re.compile(
    r"^\[ *(?P<at>\d+\.\d+)\] NVRM: Xid \((?:PCI:)?(?P<bus>[0-9A-Fa-f:.]+)\): (?P<number>\d+), *(?P<text>.*)"
)
_BROKEN = re.compile(r"lost|requires reset|Unknown Error|ERR!", re.IGNORECASE)
_GPU_FIELDS = "index,pci.bus_id,ecc.errors.uncorrected.volatile.total,retired_pages.pending"
_ROW_FIELDS = "gpu_bus_id,remapped_rows.pending,remapped_rows.failure"


def print_findings(run_dir: Path) -> int:
    """The node's name and its findings, as one JSON line."""
    line = {
        "node": _node_name(),
        "findings": list(check_node(run_dir, os.environ)),
        "shared": list(check_shared(run_dir, os.environ)),
    }
    os.write(1, json.dumps(line).encode() + b"\n")  # in one piece: srun puts the lines of all nodes together
    return 0


def check_node(run_dir: Path, env: Mapping[str, str], *, local: bool = False) -> Iterator[str]:
    """One sentence for each thing that is wrong with this node."""
    if not local:
        yield from _gpus(env)
        yield from _way_to_rank_0(env)
    if not _is_shared(temporary := _temporary(env), run_dir):
        yield from _disk(temporary, _TEMPORARY)


def check_shared(run_dir: Path, env: Mapping[str, str]) -> Iterator[str]:
    """The same for file systems that all nodes see: where all nodes say it, it is no node's fault."""
    yield from _writable(run_dir, "the run directory")
    if _is_shared(temporary := _temporary(env), run_dir):
        yield from _disk(temporary, _TEMPORARY)


def _node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


# -- GPUs ---------------------------------------------------------------------------------------------------------


def _gpus(env: Mapping[str, str]) -> Iterator[str]:
    asked = env.get("SLURM_GPUS_ON_NODE", "")
    if not asked.isdigit() or asked == "0" or shutil.which("nvidia-smi", path=env.get("PATH")) is None:
        return
    try:
        yield from _asked_of_the_driver(int(asked), env)
    except subprocess.TimeoutExpired:
        yield f"nvidia-smi does not answer within {SMI_SECONDS:g} s"


def _asked_of_the_driver(asked: int, env: Mapping[str, str]) -> Iterator[str]:
    queries = [_start_smi(f"--query-gpu={_GPU_FIELDS}"), _start_smi(f"--query-remapped-rows={_ROW_FIELDS}")]
    end = time.monotonic() + SMI_SECONDS
    try:
        (code, gpus, words), rows = (_answer(query, end) for query in queries)
    finally:
        for query in queries:
            _give_up(query)
    if code and not _is_old_driver(words):
        yield f"nvidia-smi ended with code {code}: {words.strip()[:300]}"
        return
    if not code:
        ours = _ours(gpus, asked, env)
        if len(ours) < asked:
            yield f"{len(ours)} of {asked} GPUs are there"
        yield from _faults(ours)
        buses = {cells[1].lower() for cells in ours}
        yield from _row_faults(rows, buses)
        yield from _xids(buses)


def _start_smi(query: str) -> subprocess.Popen[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=-1, stderr=subprocess.STDOUT, text=True)


def _give_up(query: subprocess.Popen[str]) -> None:
    """End it, if it has not ended. One that hangs in its driver cannot be killed, and is not waited for."""
    query.kill()
    assert query.stdout is not None
    query.stdout.close()
    try:
        query.wait(timeout=1)
    except subprocess.TimeoutExpired:
        pass


def _answer(query: subprocess.Popen[str], end: float) -> tuple[int, list[list[str]], str]:
    text, _ = query.communicate(timeout=max(0.1, end - time.monotonic()))
    return query.returncode, [[cell.strip() for cell in line.split(",")] for line in text.splitlines()], text


def _is_old_driver(words: str) -> bool:
    return "not a valid field" in words or "nvalid combination of input" in words


def _ours(gpus: list[list[str]], asked: int, env: Mapping[str, str]) -> list[list[str]]:
    """The job's own GPUs: all that are seen, or where the site hides none, those that Slurm has numbered."""
    found = [cells for cells in gpus if len(cells) == 4]
    numbers = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if len(found) <= asked or not all(number.isdigit() for number in numbers):
        return found
    return [cells for cells in found if cells[0] in numbers]


def _faults(gpus: list[list[str]]) -> Iterator[str]:
    for index, bus, uncorrected, pending in gpus:
        name = f"GPU {index} ({bus})"
        if broken := next((cell for cell in (index, bus, uncorrected, pending) if _BROKEN.search(cell)), None):
            yield f"{name}: {broken.strip('[]')}"
        elif uncorrected.isdigit() and uncorrected != "0":
            yield f"{name}: {uncorrected} uncorrectable ECC errors since its driver was loaded"
        elif pending.lower() == "yes":
            yield f"{name}: a page waits for its retirement, that is for a reset of the GPU"


def _row_faults(answer: tuple[int, list[list[str]], str], buses: set[str]) -> Iterator[str]:
    """Of GPUs that replace rows of their memory (Ampere and newer)."""
    for bus, pending, failure in (cells for cells in answer[1] if len(cells) == 3 and not answer[0]):
        if bus.lower() in buses and failure.lower() in ("1", "yes"):
            yield f"GPU {bus}: a row of its memory could not be remapped"
        elif bus.lower() in buses and pending.lower() in ("1", "yes"):
            yield f"GPU {bus}: a row of its memory waits to be remapped, that is for a reset of the GPU"


def _xids(buses: set[str]) -> Iterator[str]:
    """The hardware's own Xids of the last hour, where the kernel's log can be read."""
    if shutil.which("dmesg") is None:
        return
    log = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=SMI_SECONDS, check=False)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    for line in log.stdout.splitlines():
        match = _XID.match(line)
        if match is None or int(match["number"]) not in _HARDWARE_XIDS or now - float(match["at"]) > RECENT_SECONDS:
            continue
        # The kernel says 0000:3b:00, nvidia-smi 00000000:3B:00.0
        if any(match["bus"].lower() in bus for bus in buses):
            yield f"GPU {match['bus']}: Xid {match['number']}, {match['text'].strip()[:200]}"


# -- disk and network ---------------------------------------------------------------------------------------------


def _temporary(env: Mapping[str, str]) -> Path:
    return Path(env.get("TMPDIR") or "/tmp")


def _is_shared(folder: Path, run_dir: Path) -> bool:
    """Whether a folder lies on the file system of the run directory, or on another one of the network, see proc(5)."""
    try:
        device = folder.stat().st_dev
        if device == run_dir.stat().st_dev:
            return True
        name = f"{os.major(device)}:{os.minor(device)}"
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    kinds = [mount.partition(" - ")[2].split()[0] for mount in mounts if mount.split()[2] == name]
    return any(kind.startswith(_NETWORK) for kind in kinds)


def _writable(folder: Path, called: str) -> Iterator[str]:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(4096))
            file.flush()
            fsync(file.fileno())
    except OSError as error:
        yield f"{called} {folder} cannot be written: {error.strerror}"


def _disk(folder: Path, called: str) -> Iterator[str]:
    findings = list(_writable(folder, called))
    yield from findings
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    if not findings and free < LEAST_BYTES:
        yield f"{called} {folder} has {free >> 20} MB left"


def _way_to_rank_0(env: Mapping[str, str]) -> Iterator[str]:
    host, _, port = env.get(WHERE, "").rpartition(":")
    if not host:
        return
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as way:
            way.settimeout(CONNECT_SECONDS)
            way.sendall(env[TOKEN].encode())
            if way.recv(64) != b"ok":
                yield f"somebody else answers at {host}:{port}"
    except socket.gaierror:
        yield f"the name of rank 0's node, {host}, has no address here"
    except OSError as error:
        yield f"rank 0's node {host} cannot be reached: {error.strerror or error}"
