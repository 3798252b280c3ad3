"""Fault injectors: kill a rank, damage a file, or stop a part of the cluster.

They act from outside: with signals, with system call faults injected by strace, with changed bytes on the disk, and
with Slurm's own commands.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hpcaccel import checkpoint_files
from hpcaccel.core.process_identity import process_start

from .dev_cluster import Cluster, program, wait_until
from .scenario import Scenario

DURABLE = ("fsync", "fdatasync", "mkdir", "mkdirat", "rename", "renameat", "renameat2")
"""System calls that a training makes only while it saves: their counts number the points of a save."""

PAGE_BYTES = 4096

# -- ranks ---------------------------------------------------------------------------------------------------------


def pid_of(run: Scenario, rank: int) -> int:
    """Process id of a rank of the newest attempt, as soon as it has started."""
    attempt = run.lines("start")[-1]["attempt"]
    return int(run.wait_for_word("starting", attempt=attempt, rank=rank).split()[1])


def signal_rank(run: Scenario, rank: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal to a rank; return whether it was still running."""
    pid = pid_of(run, rank)
    if process_start(pid) is None:
        return False
    os.kill(pid, number)
    return True


def family(pid: int) -> list[int]:
    """A process and all its descendants, such as a writer of checkpoints."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


# -- system calls --------------------------------------------------------------------------------------------------


@contextmanager
def injected(
    run: Scenario, rank: int, fault: str, *, calls: Sequence[str] = DURABLE, when: str = "1"
) -> Iterator[Path]:
    """Inside the block, inject a fault in the sense of strace(1) (``signal=KILL``, ``error=ENOSPC``) into the rank's
    ``calls``; yields the log of its calls. ``when``: which of them, counted for each thread."""
    log = run.folder / f"strace-{rank}-{time.monotonic_ns()}"
    names = ",".join(calls)
    pids = [f"--attach={pid}" for pid in family(pid_of(run, rank))]
    command = ["strace", "-f", "-y", *pids, f"--output={log}"]
    command += [f"--trace={names}", f"--inject={names}:{fault}:when={when}"]
    tracer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert tracer.stdout is not None
    tracer.stdout.readline()  # "Process … attached", or why not
    try:
        yield log
    finally:
        tracer.terminate()
        try:
            tracer.communicate(timeout=2)
        except subprocess.TimeoutExpired:  # seen where a process with many threads was killed: none is left to wait for
            tracer.kill()
            tracer.communicate()


def kill_inside_a_save(run: Scenario, rank: int, call: str, number: int, *, timeout_seconds: float = 90) -> str:
    """Kill the process of a rank that is about to make its ``number``-th ``call`` from now on; return that call.

    Raises:
        TimeoutError: it made fewer calls.
    """
    with injected(run, rank, "signal=KILL", calls=[call], when=str(number)) as log:

        def killed() -> bool:
            return "+++ killed by SIGKILL" in log.read_text()

        wait_until(killed, f"{call} {number} of rank {rank}", timeout_seconds=timeout_seconds)
    said = [line for line in log.read_text().splitlines() if line.endswith("= ?")]
    return said[-1] if said else "killed by somebody else"


# -- files ---------------------------------------------------------------------------------------------------------


def _rewrite(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    assert data != path.read_bytes(), f"{path} is not damaged"
    path.write_bytes(data)


def flip_bit(path: Path, dice: random.Random) -> None:
    def change(data: bytearray) -> None:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)

    _rewrite(path, change)


def zero_page(path: Path, dice: random.Random) -> None:
    """Replace a page by zeros, as if it had never been written."""

    def change(data: bytearray) -> None:
        starts = [at for at in range(0, len(data), PAGE_BYTES) if any(data[at : at + PAGE_BYTES])]
        start = dice.choice(starts)
        end = min(start + PAGE_BYTES, len(data))
        data[start:end] = bytes(end - start)

    _rewrite(path, change)


def truncate(path: Path, dice: random.Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size))


def remove(path: Path, dice: random.Random) -> None:
    path.unlink()


def swap(path: Path, dice: random.Random) -> None:
    """Swap with another file of the same checkpoint, or replace by the same file of an older one."""
    neighbours = [other for other in path.parent.iterdir() if other != path and other.is_file()]
    older = [item.path / path.name for item in checkpoint_files.committed(path.parents[1]) if item.path != path.parent]
    other = dice.choice([*neighbours, *(file for file in older if file.exists())])
    beside = path.with_name("beside")
    shutil.copyfile(path, beside)
    shutil.copyfile(other, path)
    if other.parent == path.parent:
        shutil.move(beside, other)
    else:
        beside.unlink()


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "bit flip": flip_bit,
    "zeroed page": zero_page,
    "truncation": truncate,
    "missing file": remove,
    "swapped file": swap,
}


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


# -- the cluster ---------------------------------------------------------------------------------------------------


@contextmanager
def taken_away(cluster: Cluster, role: str, *, jobs_go_on: bool = False) -> Iterator[None]:
    """Let a node, ``slurmctld`` or ``slurmdbd`` fail inside the block."""
    program("fail", "--root", str(cluster.root), role, *(["--slurmd-only"] if jobs_go_on else []))
    try:
        yield
    finally:
        program("restore", "--root", str(cluster.root), role)


@contextmanager
def drained(cluster: Cluster, node: str) -> Iterator[None]:
    """Drain a node inside the block: running jobs continue, no new ones start. A ``slurmctld`` that is killed after the
    block finds the node in service: its state is on the disk, which Slurm otherwise does some seconds later."""
    cluster.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=a test")
    try:
        yield
    finally:
        begun, state = time.time(), cluster.root / "spool" / "slurmctld" / "node_state"
        cluster.run("scontrol", "update", f"nodename={node}", "state=resume")
        wait_until(lambda: state.stat().st_mtime > begun, "Slurm has saved the state of its nodes")


def hold_in_queue(run: Scenario) -> None:
    """Stop the run and hold its job in the queue, with no process of it left.

    The end may be that of an attempt which was lost shortly before, written by the next start of the job: then the job
    runs again, and is stopped once more."""
    assert run.cluster is not None
    cluster = run.cluster

    def is_pending() -> bool:
        return cluster.job(run.job_id)["JobState"] == "PENDING"

    def stop_and_hold() -> bool:
        starts, ends = len(run.lines("start")), len(run.lines("end"))
        run.cli("stop", "--requeue", run.dir.run_id)
        run.wait_for_ends(ends + 1)
        cluster.wait_for(run.job_id, ["PENDING", "RUNNING"])
        cluster.run("scontrol", "hold", run.job_id)
        wait_until(lambda: is_pending() or len(run.lines("start")) > starts, "the job is held, or starts again")
        return is_pending()

    while not stop_and_hold():
        pass


def release(run: Scenario) -> None:
    assert run.cluster is not None
    run.cluster.run("scontrol", "release", run.job_id)
