"""A process that has imported torch and forks a child per request: ``python template.py FD``, started by ``forked.py``.

Requests arrive on the socket FD. Modules named after it are imported, too. The child runs the requested program with
the environment, the session, the ``__main__`` and the exit of a Python process started for it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

LARGEST_REQUEST = 1 << 17
WHAT_RANKS_IMPORT = (
    "numpy",
    "torch._dynamo",  # imported by an optimizer's first step
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",  # imported by a DTensor's first operation
    "torch.distributed.tensor.parallel",
)
"""Nothing of hpcaccel: it imports quickly and must see each program's environment."""


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork a child per request. Returns the request in the child, and None in the template when the socket closes."""
    children, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # without a handler nothing is written to wakeup
    reports: dict[int, int] = {}  # by child: the pipe for its exit code
    sources: list[Any] = [requests, children]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if children in ready:
            os.read(children, 4096)
            _report_ends(reports)
        if requests in ready:
            message, files, _, _ = socket.recv_fds(requests, LARGEST_REQUEST, 2)
            if not message:
                break
            output, report = files
            child = os.fork()
            if child == 0:
                _leave(requests, output)
                return dict(json.loads(message))
            os.close(output)
            os.write(report, _number(child))
            reports[child] = report
    for child in reports:
        os.kill(child, signal.SIGKILL)
    return None


def _report_ends(reports: dict[int, int]) -> None:
    for child, report in list(reports.items()):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == 0:
            continue
        try:
            os.write(report, _number(os.waitstatus_to_exitcode(status)))
        except BrokenPipeError:
            pass  # the reader has closed the pipe
        os.close(report)
        del reports[child]


def _number(value: int) -> bytes:
    return value.to_bytes(4, sys.byteorder, signed=True)


def _leave(requests: socket.socket, output: int) -> None:
    """Drop the template's state in the child: signal handling, session, output and open files."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    requests.detach()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def become(program: str, *, arguments: list[str], environment: dict[str, str], folder: str, blocked: list[int]) -> None:
    """Run the program as ``python PROGRAM ARGUMENT ...`` does. The interpreter handles exceptions and the exit."""
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    tempfile.tempdir = None
    sys.modules["numpy"].random.seed()  # Python's own generator is reseeded after a fork
    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(program))
    main = ModuleType("__main__")
    main.__dict__.update(__file__=program, __loader__=SourceFileLoader("__main__", program), __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(compile(Path(program).read_bytes(), program, "exec", dont_inherit=True), main.__dict__)


def main() -> None:
    for name in (*WHAT_RANKS_IMPORT, *sys.argv[2:]):
        importlib.import_module(name)
    threads = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in os.listdir("/proc/self/task")]
    # pyarrow's jemalloc has a thread that frees memory, and handlers that make a fork safe.
    others = [name for name in threads if name != "jemalloc_bg_thd"]
    assert len(others) == 1, f"a process with threads must not be forked: {threads}"
    gc.collect()
    gc.freeze()  # otherwise each child's last collection would visit, and so copy, all of torch's objects
    wanted = serve(socket.socket(fileno=int(sys.argv[1])))
    if wanted is not None:
        become(**wanted)


if __name__ == "__main__":
    main()
