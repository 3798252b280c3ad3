"""The writer process: it writes a rank's file, and for rank 0 also commits the checkpoint, while the rank trains.

Each rank starts a writer at its first background save and keeps it for later saves. The writer shares the memory of the
rank's snapshots. ``WriterProcess`` is the rank's handle; ``main`` runs in the process. The process does not import
torch, so it starts fast and uses little memory, and it does not hold the GIL of the training process.

- Orders, on standard input: a line of JSON (see ``SaveOperation.order`` and ``BackgroundWriter.start``) that also
  contains ``chunks_bytes``, then so many bytes: JSON of the file's ``PlannedChunk`` list. The line ``{"hurry": true}``
  ends the slow pace of the save in progress.
- Reports, on standard output, one line of JSON each: ``written`` when this rank's file is on the disk, ``committed``
  (from rank 0's writer) after the commit and the deletion of old checkpoints, ``failed`` with the reason.

The process must not outlive its rank: a checkpoint of an ended attempt must not appear while the next attempt searches
for the newest checkpoint. When its input ends, or its parent process changes, it exits without finishing. It ignores
the signals that stop training: the rank handles them and waits for the writer.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from typing import IO, Any

from hpcaccel.checkpoint import commit, save_reports
from hpcaccel.checkpoint.huge_pages import SharedPages
from hpcaccel.checkpoint.rank_blocks import Block
from hpcaccel.checkpoint.rank_file_writer import RankFileWriter
from hpcaccel.checkpoint_files import SavePaths
from hpcaccel.core.durable_files import LineSplitter, json_line, write_all

__all__ = ["WriterProcess", "main"]

PARENT_CHECK_SECONDS = 1.0
"""Interval at which the parent process id is checked, in case a forked child of the rank keeps the pipe open."""
IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that stop training or a shell's jobs; the rank handles them and waits for the writer."""
PROGRAM = (
    "import json, sys; sys.path += json.loads(sys.argv[1]); "
    "from hpcaccel.checkpoint.writer import main; main(sys.argv[2:])"
)
"""Code of the writer process. Its arguments are ``package_paths`` as JSON, then those of ``main``."""


# -- in the rank


class WriterProcess:
    """A rank's handle to its writer process, which the constructor starts.

    Args:
        descriptor: file descriptor of the shared memory.
        size: size of the shared memory in bytes.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        arguments = [json.dumps(package_paths()), str(descriptor), str(size), str(os.getpid())]
        # Block the signals here: the process inherits the mask, which protects it until it ignores the signals.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", PROGRAM, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(descriptor,),
                bufsize=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[bytes] = self._process.stdin
        self._output: IO[bytes] = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._poll = select.poll()
        self._poll.register(self._output, select.POLLIN)
        self._lines = LineSplitter()
        self.reports: dict[str, Any] = {}
        """Reports on the last order, by name."""
        self._problem: str | None = None
        self._end = weakref.finalize(self, _end, self._process, os.getpid())
        self._end.atexit = False

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def send(self, order: dict[str, Any], chunks: bytes) -> None:
        """Send an order; see the module's docstring."""
        self.reports.clear()
        write_all(self._input.fileno(), json_line({**order, "chunks_bytes": len(chunks)}) + chunks)

    def hurry(self) -> None:
        """Let the save in progress continue at full speed."""
        with suppress(OSError):  # the process has ended, which ``poll`` reports
            write_all(self._input.fileno(), json_line({"hurry": True}))

    def poll(self) -> str | None:
        """Receive reports, without waiting.

        Returns:
            Why the writer failed; None if it has not failed.
        """
        while self._problem is None and self._poll.poll(0):
            piece = os.read(self._output.fileno(), 1 << 16)
            if not piece:
                self._problem = f"the writer process ended ({self._exit_text()})"
                break
            for line in self._lines.feed(piece):
                self.reports.update(json.loads(line))
            self._problem = self.reports.get("failed")
        return self._problem

    def _exit_text(self) -> str:
        code = self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def wait(self, seconds: float) -> None:
        """Wait until a report can be read or the process has ended, for at most ``seconds``."""
        self._poll.poll(1000 * seconds)

    def take_reports(self) -> dict[str, Any]:
        """Return the reports on the last order and clear them."""
        reports, self.reports = self.reports, {}
        return reports

    def stop(self) -> None:
        """Kill the process."""
        self._end()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child of the rank, such as a data loader worker
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def package_paths() -> list[str]:
    """Directories of hpcaccel and (if installed) isal. Without site-packages the writer starts faster."""
    found = [Path(__file__).parents[2]]
    spec = find_spec("isal")
    if spec is not None and spec.origin is not None:
        found.append(Path(spec.origin).parents[1])
    return [str(place) for place in found]


# -- in the writer


def main(arguments: list[str]) -> None:
    """Execute orders until the rank has exited. Arguments: descriptor and size of the shared memory, the rank's pid."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    descriptor, size, parent = map(int, arguments)
    hurry = threading.Event()
    memory = SharedPages(descriptor, size)
    files = RankFileWriter(memory.view, hurry)
    orders: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
    threading.Thread(target=_execute_orders, args=(orders, files, memory, parent), daemon=True).start()
    # Otherwise this thread, when an order wakes it, could take the CPU from the rank's training thread that sends it.
    with suppress(AttributeError, OSError):  # only Linux has this policy
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    _receive_orders(orders, hurry, parent)
    os._exit(0)


def _receive_orders(
    orders: queue.SimpleQueue[tuple[dict[str, Any], bytes]], hurry: threading.Event, parent: int
) -> None:
    """Put orders into the queue. Return when the rank has exited."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    received = b""
    while True:
        while not poll.poll(1000 * PARENT_CHECK_SECONDS):
            if os.getppid() != parent:
                return
        piece = os.read(0, 1 << 20)  # unbuffered: poll does not detect data in a buffer
        if not piece:
            return
        received += piece
        while (split := _split_order(received)) is not None:
            order, chunks, received = split
            if "hurry" in order:
                hurry.set()
            else:
                hurry.clear()  # it was for the save before
                orders.put((order, chunks))


def _split_order(received: bytes) -> tuple[dict[str, Any], bytes, bytes] | None:
    """Split ``received`` into the first order, its chunks and the remaining bytes; None if the order is incomplete."""
    line, newline, rest = received.partition(b"\n")
    if not newline:
        return None
    order: dict[str, Any] = json.loads(line)
    size = order.get("chunks_bytes", 0)
    return None if len(rest) < size else (order, rest[:size], rest[size:])


def _execute_orders(
    orders: queue.SimpleQueue[tuple[dict[str, Any], bytes]], files: RankFileWriter, memory: SharedPages, parent: int
) -> None:
    while True:
        order, chunks = orders.get()
        try:
            paths = SavePaths(Path(order["directory"]), order["step"], order["attempt"])
            waited = 0.0
            if order["lengths"]:
                written = replace(files.write(order, paths), chunks=json.loads(chunks), others=order["others"])
                waited = files.waited
                save_reports.deliver(paths, written, block=_block(order))
            _report({"written": True, "waited": waited})
            if "files" in order:
                _commit(order, paths, parent)
        except BaseException as error:  # report any error to the rank
            _report({"failed": _error_text(error)})
        memory.move_to_huge_pages(orders.empty)  # takes too long to be done before the first save


def _commit(order: dict[str, Any], paths: SavePaths, parent: int) -> None:
    """Gather, publish and retire; see ``commit``."""

    def exit_without_rank() -> None:
        if os.getppid() != parent:
            os._exit(0)

    block, files, blocks = _block(order), [], None
    if block is None:
        files = save_reports.gather(paths, order["files"], exit_without_rank)
    else:
        blocks = save_reports.gather_blocks(paths, order["files"], exit_without_rank)
    exit_without_rank()
    size = commit.write_manifest(paths.temporary, files=files, facts=order["facts"], block=block, blocks=blocks)
    linked = sum(file.linked_bytes for file in files) + sum(block["linked_bytes"] for block in blocks or ())
    commit.publish(paths.temporary, paths.final)
    rmtree(paths.results, ignore_errors=True)  # if this fails, the next save removes the folder
    committed = time.monotonic()
    if order["retention"] is not None:
        commit.delete(commit.retire(paths.directory, newest_step=paths.step, **order["retention"]))
    _report({"committed": committed, "bytes": size, "linked_bytes": linked})


def _block(order: dict[str, Any]) -> Block | None:
    return None if order["block"] is None else Block(*order["block"])


def _error_text(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'the file'}: {error.strerror or error}"
    return f"{type(error).__name__}: {error}"


def _report(report: dict[str, Any]) -> None:
    os.write(1, json.dumps(report).encode() + b"\n")
