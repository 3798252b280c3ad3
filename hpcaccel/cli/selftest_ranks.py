"""Starts the ranks of a self-test on this machine, and waits for them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hpcaccel.cli.output import note
from hpcaccel.core.free_port import free_port
from hpcaccel.core.parent_death import dying_with_us
from hpcaccel.core.run_dir import default_runs_dir
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.view.selftest_results import SelftestResults

__all__ = ["CheckNames", "run_on_this_machine"]

WITHOUT_GPUS = 2
"""Number of ranks on a machine without GPUs."""
LOOK_SECONDS = 0.2
TIMEOUTS, MORE_SECONDS = 12, 600.0
"""The ranks are killed after this many timeouts and this many seconds more: longer than all limits of their checks."""
SMI_SECONDS = 30.0
_DROPPED = ("SLURM_", "TORCHELASTIC_", "HPCACCEL_RUN_DIR", "HPCACCEL_ATTEMPT", "HPCACCEL_PROTOCOL", "OMPI_", "PMI_")


def run_on_this_machine(count: int | None, *, timeout_seconds: float, runs_dir: Path | None) -> SelftestResults:
    """Run the self-test with ``count`` ranks (default: one per GPU, else ``WITHOUT_GPUS``).

    Raises:
        UserError: no folder for the results can be created, or this Python has no torch.
        SystemExit: SIGTERM or SIGHUP arrived. The ranks are ended and the folders deleted, as after SIGINT.
    """
    from hpcaccel.view.selftest_results import read_results

    _require_torch()
    gpus = _gpu_count()
    count = count or gpus or WITHOUT_GPUS
    note(f"testing this machine with {count} rank{'' if count == 1 else 's'}{'' if gpus else ' on the CPU'}")
    with ExitStack() as stack:
        stack.enter_context(_exit_at_signals())
        results = Path(stack.enter_context(_temporary_folder(Path(tempfile.gettempdir()), "hpcaccel-test-")))
        place = _existing(default_runs_dir() if runs_dir is None else runs_dir.expanduser().absolute())
        try:
            checkpoints = stack.enter_context(_temporary_folder(place, "selftest-"))
        except UserError:
            checkpoints = place  # the check of the disks reports why
        command = [sys.executable, "-m", "hpcaccel.runtime.selftest", "--results", str(results)]
        command += ["--checkpoints", str(checkpoints), "--timeout", f"{timeout_seconds:g}", "--expected", str(count)]
        outputs = _run(command, count, CheckNames(results), limit=TIMEOUTS * timeout_seconds + MORE_SECONDS)
        found = read_results(results, outputs=outputs, expected=count, places=[socket.gethostname()] * count)
        if found.missing:
            for rank in found.missing:
                note(f"the last output of rank {rank}:\n{outputs[rank][-2000:].rstrip() or '(none)'}")
        return found


def _require_torch() -> None:
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise UserError(
            f"{sys.executable} has no torch, which the self-test needs. Install it (pip install torch), or test a "
            "cluster with --cluster NAME"
        )


def _gpu_count() -> int:
    """The number of GPUs that the ranks will see, without an import of torch."""
    from hpcaccel.launch.gpus import count_gpus

    found = count_gpus(os.environ)
    if found or "CUDA_VISIBLE_DEVICES" in os.environ or shutil.which("nvidia-smi") is None:
        return found
    try:
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=SMI_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"nvidia-smi did not respond within {SMI_SECONDS:g} s: the GPU driver probably hangs. Reboot the machine, "
            "or test without GPUs: CUDA_VISIBLE_DEVICES= hpcaccel test"
        ) from None
    return found


def _existing(folder: Path) -> Path:
    """``folder`` or its nearest parent that exists: a runs directory is created by the first run."""
    return next(place for place in (folder, *folder.parents) if place.is_dir())


@contextmanager
def _temporary_folder(place: Path, prefix: str) -> Iterator[Path]:
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    except OSError as error:
        raise UserError(f"cannot create a folder in {place}: {error.strerror}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _exit_at_signals() -> Iterator[None]:
    """Turn the first SIGTERM or SIGHUP into SystemExit, so that the block cleans up. Later ones are ignored, and so is
    SIGHUP if it was ignored before (nohup)."""

    def leave(number: int, _: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {one: old for one in (signal.SIGTERM, signal.SIGHUP) if (old := signal.getsignal(one)) != signal.SIG_IGN}
    for one in before:
        signal.signal(one, leave)
    try:
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)


class CheckNames:
    """Prints the name of each check once the first rank has begun it."""

    def __init__(self, results: Path) -> None:
        self._results = results
        self._shown: set[str] = set()

    def show(self) -> None:
        """Print the names of checks that have begun since the last call."""
        from hpcaccel.view.selftest_results import read_results

        for process in read_results(self._results).processes:
            for name in process.checks:
                if name not in (*self._shown, "end"):
                    self._shown.add(name)
                    note(f"  {name}")


def _run(command: list[str], count: int, names: CheckNames, *, limit: float) -> list[str]:
    """Run all ranks until they have ended. Returns their outputs."""
    shared = {key: value for key, value in os.environ.items() if not key.startswith(_DROPPED)}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port())}
    shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    ranks: list[subprocess.Popen[str]] = []
    outputs = [""] * count
    readers: list[threading.Thread] = []

    def read(number: int) -> None:
        stream = ranks[number].stdout
        assert stream is not None
        outputs[number] = stream.read()

    end = time.monotonic() + limit
    prepare = dying_with_us()
    try:
        for number in range(count):
            env = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
            ranks.append(
                subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    text=True, errors="replace", preexec_fn=prepare,
                )
            )  # fmt: skip
        for number in range(count):  # after all forks: a process with threads must not fork
            readers.append(threading.Thread(target=read, args=(number,), daemon=True))
            readers[-1].start()
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            names.show()
            time.sleep(LOOK_SECONDS)
        names.show()
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()
        for reader in readers:
            reader.join(timeout=5.0)
    return outputs
