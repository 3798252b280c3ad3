"""A real Jupyter kernel for tests: runs cells, one after the other, and interrupts them as a notebook does."""

from __future__ import annotations

import os
import queue
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

TIMEOUT_SECONDS = 120.0


@dataclass
class CellOutput:
    """What a cell has shown."""

    stdout: str = ""
    stderr: str = ""
    error: str = ""
    """Type and message of the error, as in ``ValueError: too large``; empty if there was none."""
    traceback: str = ""
    """As shown below the cell, without colours."""
    displayed: list[dict[str, Any]] = field(default_factory=list)
    """The data of each display, by MIME type. A display that was updated has all its versions here."""
    updates: int = 0

    def take(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            setattr(self, content["name"], getattr(self, content["name"]) + content["text"])
        elif kind == "error":
            self.error = f"{content['ename']}: {content['evalue']}"
            self.traceback = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
        elif kind in ("display_data", "execute_result", "update_display_data"):
            self.displayed.append(content["data"])
            self.updates += kind == "update_display_data"


class Kernel:
    """A kernel whose cells are numbered from 1, like those of a notebook."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client
        self.cells = 0

    def run(self, source: str) -> CellOutput:
        self.start(source)
        return self.finish()

    def start(self, source: str) -> None:
        """Start a cell, and return at once."""
        self.cells += 1
        self.shown = CellOutput()
        self.request = self.client.execute(source)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.process.pid)  # type: ignore[attr-defined, union-attr]

    def wait_for(self, text: str, *, times: int = 1) -> None:
        """Wait until the cell has printed ``text``."""
        self.wait_until(lambda shown: shown.stdout.count(text) >= times)

    def wait_until(self, reached: Callable[[CellOutput], bool]) -> None:
        """Wait until the output of the running cell has reached a state."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not reached(self.shown):
            assert time.monotonic() < deadline, self.shown
            assert not self._take_message(), self.shown

    def finish(self) -> CellOutput:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self._take_message():
            assert time.monotonic() < deadline, self.shown
        return self.shown

    def interrupt(self) -> None:
        """What the stop button does."""
        self.manager.interrupt_kernel()

    def _take_message(self) -> bool:
        """Wait for the next message for at most a second. Returns whether the cell has ended."""
        try:
            message = self.client.get_iopub_msg(timeout=1)
        except queue.Empty:
            assert self.manager.is_alive(), "the kernel has died"
            return False
        if message["parent_header"].get("msg_id") != self.request:
            return False
        content, kind = message["content"], message["msg_type"]
        self.shown.take(kind, content)
        return bool(kind == "status" and content["execution_state"] == "idle")


@contextmanager
def started_kernel(cwd: Path, **environment: str) -> Iterator[Kernel]:
    """A kernel of the interpreter that runs the tests, in the folder ``cwd``."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HPCACCEL_", "SLURM_"))}
    # A socket's path has at most 107 characters: those of a test's own folder may be longer.
    with tempfile.TemporaryDirectory(prefix="kernel-") as sockets:
        manager = KernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/s")
        manager.start_kernel(cwd=str(cwd), env={**own, "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(cwd), **environment})
        client = manager.blocking_client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=TIMEOUT_SECONDS)
            yield Kernel(manager, client)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
            manager.cleanup_resources()
