"""Checks of one node that involve no other rank: kernel, disks, network interfaces, NCCL, GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hpcaccel.core.durable_files import objects_in
from hpcaccel.core.formatting import size
from hpcaccel.runtime.compat.availability import kernel_problem
from hpcaccel.runtime.distributed.rank_env import RankEnvironment
from hpcaccel.runtime.distributed.rendezvous import interface_of, own_address_towards
from hpcaccel.runtime.selftest.check_runner import CheckFailed, CheckRunner, Fault, first_line

__all__ = ["check_disks", "check_gpus", "check_kernel", "check_network", "default_folders"]

WRITTEN_BYTES = 8 << 20
"""How much is written to each folder."""
LEAST_BYTES = 64 << 20
SCARCE_BYTES, SCARCE_SHARE = 1 << 30, 0.10
"""A file system is nearly full if it has less than ``LEAST_BYTES`` free, or less than both of these."""
LEAST_FILES = 1000
SMI_SECONDS = 30.0
PREFLIGHT_SECONDS = 60.0
USED_BYTES = 2 << 30
"""GPU memory in use by other processes from which on a warning is given."""
INFINIBAND = Path("/sys/class/infiniband")


def check_kernel(runner: CheckRunner) -> None:
    """Record the kernel release, and warn about Linux kernels older than 5.5, on which training processes may hang."""
    runner.measure(release=platform.release(), python=platform.python_version(), torch=torch.__version__)
    if (problem := kernel_problem()) is not None:
        runner.report(Fault(kind="kernel", message=problem, severity="warning"))


# -- disks -------------------------------------------------------------------------------------------------------------


def default_folders(checkpoints: Path) -> list[Path]:
    """The folders that a training writes to: checkpoints, temporary files, shared memory of the loaders."""
    temporary, shared = Path(os.environ.get("TMPDIR") or "/tmp"), Path("/dev/shm")
    return list(dict.fromkeys([checkpoints, temporary, *([shared] if shared.is_dir() else [])]))


def check_disks(runner: CheckRunner, folders: Sequence[Path]) -> bool:
    """Write a file to each folder, read it back, and compare the free space with the limits. Returns whether all
    folders could be written."""
    measured: dict[str, Mapping[str, Any]] = {}
    writable = True
    for folder in folders:
        runner.step(f"write to {folder}")
        try:
            measured[str(folder)] = found = _write(folder)
        except OSError as error:
            writable = False
            full = " (no space left)" if "space" in (error.strerror or "") else ""
            message = f"cannot write {size(WRITTEN_BYTES)} to {folder}{full}: {error.strerror}, {_free_text(folder)}"
            runner.report(Fault(kind="disk_full" if full or "uota" in message else "disk", message=message))
            continue
        if found["corrupted"]:
            runner.report(Fault(kind="disk", message=f"a file in {folder} has other contents than were written"))
        for message in _scarcity(folder, found):
            runner.report(Fault(kind="disk_full", message=message, severity="warning"))
    runner.measure(folders=measured)
    return writable


def _write(folder: Path) -> Mapping[str, Any]:
    block = os.urandom(1 << 20)
    started = time.monotonic()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(WRITTEN_BYTES // len(block)):
            written = 0
            while written < len(block):  # a write to a nearly full disk may be partial
                written += file.write(memoryview(block)[written:])
        os.fsync(file.fileno())
        seconds = time.monotonic() - started
        file.seek(0)
        corrupted = any(file.read(len(block)) != block for _ in range(WRITTEN_BYTES // len(block)))
    about = os.statvfs(folder)
    return {
        "free_bytes": about.f_bavail * about.f_frsize,
        "total_bytes": about.f_blocks * about.f_frsize,
        "free_files": about.f_favail if about.f_files else None,
        "mb_per_s": round(WRITTEN_BYTES / 1e6 / max(seconds, 1e-6), 1),
        "corrupted": corrupted,
    }


def _scarcity(folder: Path, found: Mapping[str, Any]) -> Iterator[str]:
    free, total = found["free_bytes"], found["total_bytes"]
    if free < LEAST_BYTES or (free < SCARCE_BYTES and free < SCARCE_SHARE * total):
        yield f"{folder} is nearly full: {size(free)} of {size(total)} free"
    if found["free_files"] is not None and found["free_files"] < LEAST_FILES:
        yield f"{folder} is nearly out of inodes: {found['free_files']} more files are possible"


def _free_text(folder: Path) -> str:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return f"and its free space cannot be read ({error.strerror})"
    return f"{size(usage.free)} of {size(usage.total)} free"


# -- network -----------------------------------------------------------------------------------------------------------


def check_network(runner: CheckRunner, env: RankEnvironment) -> None:
    """Record this node's network interfaces, addresses, InfiniBand ports, and NCCL's version and variables. Report a
    missing route to rank 0, and settings that select no interface."""
    interfaces = [name for _, name in socket.if_nameindex()]
    address = own_address_towards(env.master_addr)
    runner.measure(
        interfaces=interfaces,
        hostname=socket.gethostname(),
        addresses=_addresses_of_name(),
        route_to_rank_0=None if address is None else {"address": address, "interface": interface_of(address)},
        infiniband=(ports := dict(_infiniband())),
        active=sum("ACTIVE" in about["state"] for about in ports.values()),
        nccl=_nccl_version(),
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith(_NETWORK_VARIABLES)},
    )
    if address is None and env.world_size > 1:
        message = f"this node has no route to rank 0's address {env.master_addr!r}, or cannot resolve it"
        runner.report(Fault(kind="address", message=message))
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = os.environ.get(name, "")
        if value and not _selects(value, interfaces, exact=name.startswith("GLOO")):
            message = f"{name}={value} selects no network interface of this node, which has {', '.join(interfaces)}"
            runner.report(Fault(kind="interface", message=message))
    down = [port for port, about in ports.items() if "ACTIVE" not in about["state"]]
    if down and len(down) < len(ports):
        message = f"InfiniBand port {', '.join(down)} is not active ({ports[down[0]]['state']}), but others are"
        runner.report(Fault(kind="infiniband", message=message, severity="warning"))


_NETWORK_VARIABLES = ("NCCL_", "GLOO_", "FI_", "UCX_", "MASTER_")


def _addresses_of_name() -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return sorted({str(entry[4][0]) for entry in found})


def _selects(value: str, interfaces: Sequence[str], *, exact: bool) -> bool:
    """Whether NCCL's variable (prefixes; ``=name`` is exact, ``^name`` excludes) selects an interface, or all names in
    gloo's (``exact``) are interfaces: NCCL uses those that it finds, gloo fails if one is absent."""
    if value.startswith("^"):
        excluded = tuple(value[1:].removeprefix("=").split(","))
        return any(not name.startswith(excluded) for name in interfaces)
    names = value.removeprefix("=").split(",")
    if exact:
        return all(name in interfaces for name in names)
    if value.startswith("="):
        return any(name in interfaces for name in names)
    return any(name.startswith(tuple(names)) for name in interfaces)


def _infiniband() -> Iterator[tuple[str, dict[str, str]]]:
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        texts = {}
        for item in ("state", "rate"):
            try:
                texts[item] = (port / item).read_text().strip()
            except OSError:
                texts[item] = "unknown"
        yield f"{port.parts[-3]}:{port.name}", texts


def _nccl_version() -> str | None:
    if not torch.cuda.is_available():
        return None
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


# -- GPUs --------------------------------------------------------------------------------------------------------------


def check_gpus(runner: CheckRunner, env: RankEnvironment, folder: Path) -> None:
    """Record the number, names, memory, driver and peer access of the node's GPUs. Report the faults that the batch
    step's preflight check finds, and GPUs that torch cannot use."""
    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    runner.measure(
        count=count,
        names=[one.name for one in properties],
        memory_bytes=[one.total_memory for one in properties],
        without_peer_access=[
            [one, other]
            for one in range(count)
            for other in range(count)
            if one != other and not torch.cuda.can_device_access_peer(one, other)
        ],
    )
    if shutil.which("nvidia-smi") is None:
        return
    if count:
        runner.measure(driver=_driver())
        for message in _preflight_findings(max(count, env.local_world_size), folder):
            runner.report(Fault(kind="gpu", message=message))
    elif (listed := _listed()) and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1"):
        version = torch.version.cuda or "none, it is a build for the CPU"
        message = f"nvidia-smi lists {listed} GPUs, but torch {torch.__version__} can use none (its CUDA: {version})"
        runner.report(Fault(kind="gpu", message=message))


def _listed() -> int:
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    return sum(line.startswith("GPU ") for line in found.stdout.splitlines())


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    return (found.stdout.split() or ["unknown"])[0]


def _preflight_findings(requested: int, folder: Path) -> list[str]:
    """The findings of the batch step's preflight on this node: GPUs that are missing or have ECC errors, Xids."""
    command = [sys.executable, "-m", "hpcaccel.node", "preflight", str(folder)]
    variables = {"SLURM_GPUS_ON_NODE": os.environ.get("SLURM_GPUS_ON_NODE") or str(requested)}
    output = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=PREFLIGHT_SECONDS, check=True
    )
    found = list(objects_in(output.stdout, keys={"node", "findings"}))
    return [str(text) for one in found for text in one["findings"]]


def check_device(runner: CheckRunner, device: torch.device) -> None:
    """Multiply matrices on this rank's device and compare the result with the CPU's. The values are small integers, so
    that every correct result is the same.

    Raises:
        CheckFailed: the results differ, or the device cannot be used.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-4, 5, (512, 512), generator=generator).float() for _ in range(2))
    expected = left @ right
    try:
        result = (left.to(device) @ right.to(device)).cpu()
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            own = torch.cuda.memory_reserved(device)
            runner.measure(free_bytes=free, total_bytes=total)
            used = total - free - own
            if used > USED_BYTES:
                message = f"{size(used)} of the memory of {device} are in use, perhaps by another process"
                runner.report(Fault(kind="gpu_memory", message=message, severity="warning"))
    except RuntimeError as error:
        raise CheckFailed(Fault(kind="device", message=f"{device} cannot be used: {first_line(error)}")) from None
    if not torch.equal(result, expected):
        wrong = int(result.ne(expected).sum())
        message = f"{device} returned a wrong matrix product ({wrong} of {result.numel()} numbers are wrong)"
        raise CheckFailed(Fault(kind="wrong_result", message=message))
