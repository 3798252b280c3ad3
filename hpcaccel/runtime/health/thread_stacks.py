"""Stacks of this rank's threads: the position of one thread, and dumps of all of them.

Dumps are written to ``attempts/<n>/stacks/<rank>.txt``. The supervisor requests a dump by increasing the number in the
file ``asked`` in that folder, and the heartbeat's thread writes the dump. If C code holds the GIL, this thread cannot
run; the supervisor then sends SIGURG, whose handler is C code and does not need the GIL. Processes without that handler
(data-loader workers, programs started by the script, ranks without the runtime) ignore SIGURG by default.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from hpcaccel.core.durable_files import make_folder
from hpcaccel.runtime.distributed.collectives.call_site import site_of_frame

__all__ = ["SIGNAL", "StackDumper", "ThreadPosition", "thread_position"]

SIGNAL = signal.SIGURG
INNERMOST_FRAMES = 8
"""Number of innermost frames that are searched for a wait."""
_WAITING = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    "/torch/autograd/graph.py",
    "/torch/cuda/__init__.py",
    "/torch/cuda/streams.py",
    "/hpcaccel/runtime/distributed/collectives/collective_watchdog.py",
    "/hpcaccel/runtime/distributed/collectives/exchange.py",
    "/hpcaccel/runtime/distributed/group_shutdown.py",
)
"""Files of the innermost frames of a rank that waits in a collective, in the backward pass or for the GPU."""


class ThreadPosition(NamedTuple):
    """Position of a thread. While the thread does not move, the fingerprint remains the same."""

    fingerprint: int
    """Hash of all frames with their current instructions."""
    site: str
    """``file:line`` of the thread's innermost frame in the script."""
    waits: bool
    """Whether the thread waits for other ranks or for the GPU."""


def thread_position(frame: FrameType | None) -> ThreadPosition:
    """The position of the thread whose innermost frame is ``frame``."""
    frames, waits, depth = [], False, 0
    innermost = frame
    while frame is not None:
        frames.append((id(frame.f_code), frame.f_lasti))
        waits = waits or (depth < INNERMOST_FRAMES and frame.f_code.co_filename.endswith(_WAITING))
        depth += 1
        frame = frame.f_back
    return ThreadPosition(hash(tuple(frames)) & 0xFFFFFFFF, site_of_frame(innermost), waits)


class StackDumper:
    """Writes the stacks of all threads, at the supervisor's request and on SIGURG."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._handled = 0
        self._file = -1

    def register(self) -> None:
        make_folder(self._folder)
        # Never closed: faulthandler keeps using the file descriptor.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(self._folder / f"{self._rank}.txt", flags, 0o640)
        self._handled = self._last_request()
        faulthandler.register(SIGNAL, file=self._file, all_threads=True)
        os.register_at_fork(after_in_child=_unregister)

    def dump_if_requested(self) -> None:
        """Write the stacks if there is a new request."""
        request = self._last_request()
        if request > self._handled:
            self._handled = request
            self.dump()

    def dump(self) -> None:
        os.write(self._file, f"\n{time.strftime('%Y-%m-%dT%H:%M:%S')} rank {self._rank}\n".encode())
        faulthandler.dump_traceback(file=self._file, all_threads=True)

    def _last_request(self) -> int:
        # Read the file instead of checking its time: NFS revalidates a file on open but caches attributes.
        try:
            return int((self._folder / "asked").read_text() or 0)
        except (OSError, ValueError):
            return 0


def _unregister() -> None:
    """Unregister the handler in a forked worker, because it would write to the file of the worker's rank."""
    faulthandler.unregister(SIGNAL)
