"""The process of a warm parent: watches one rank, imports the same modules, and starts the rank's next attempt by fork.

It runs in the ranks' own Python (``start_warm``). The rank of the first attempt is already a child of this process.
If the connection to the supervisor closes, this process kills the rank and all processes that the rank has started,
and exits. If there was no connection from the beginning, it exits as its rank does.

A rank is forked only if its modules have been imported here, and nothing speaks against it (``preload``); otherwise it
is a new Python process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
import warnings
from typing import Any

from hpcaccel.core.durable_files import LineSplitter, json_line, read_json
from hpcaccel.core.free_memory import available_bytes
from hpcaccel.core.parent_death import die_with
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.warm.descendants import (
    adopt_orphans,
    exit_as,
    fork_is_bad,
    has_loaded,
    kill_descendants,
    out_of_memory_kills,
)
from hpcaccel.node.warm.preload import Preload
from hpcaccel.node.warm.warm_channel import connect
from hpcaccel.node.warm.warm_program import become, set_first_path

__all__ = ["main"]

FIRST_LOOK_SECONDS, LONGEST_LOOK_SECONDS = 1.0, 10.0
"""Interval between checks for the list of the rank's modules: doubled after each check."""
LEAST_BYTES = 2 << 30
"""Nothing is imported as long as the node or the job has less memory left for each rank of the node."""
ONCE_A_STEP = ("libmpi", "libpmi")
"""Libraries of MPI and of Slurm's PMI, with which a task can register once in a job step."""
NICER = 10
"""The thread that imports has a lower priority than the rank by this number, see nice(2)."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
RUN_DIR_VARIABLE = "HPCACCEL_RUN_DIR"


def main(plan: dict[str, Any]) -> None:
    """Run a warm parent. Returns only in a forked rank, at the end of the user's program.

    Args:
        plan: see ``start_warm``.
    """
    parent = WarmParent(plan)
    order = parent.serve()
    if order is None:
        exit_as(parent.status)
    else:
        become(order["arguments"], plan["python"])


def _has_memory() -> bool:
    free, ranks = available_bytes(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return free is None or free > LEAST_BYTES * ranks


class WarmParent:
    def __init__(self, plan: dict[str, Any]) -> None:
        self.status = 0
        """Wait status of the last rank."""
        self._plan = plan
        self._rank: int | None = plan["child"]
        self._attempt: int = plan["attempt"]
        self._memory_kills = out_of_memory_kills()
        self._folder: str | None = os.environ.pop(RUN_DIR_VARIABLE, None)
        """The run's directory. Without its variable, functions that modules have registered to be called in a forked
        process do not take a rank for a worker of one: hpcaccel's would unblock signals."""
        self._preload: Preload | None = None
        self._imported = threading.Event()
        """Set at the end of the imports."""
        self._problem = ""
        """Why ranks are not forked although there is a list of their modules."""
        self._reported = self._is_bound = False
        self._pause = FIRST_LOOK_SECONDS
        self._look_at = time.monotonic() + self._pause
        self._missed: set[int] = set()
        """Stop signals received while no rank was running. The next rank gets them."""
        self._lines = LineSplitter()
        adopt_orphans()
        self._woken, self._wakeup = socket.socketpair()
        for end in (self._woken, self._wakeup):
            end.setblocking(False)
        for number in (signal.SIGCHLD, *_STOP_SIGNALS):
            signal.signal(number, self._note)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        # All other signals stay blocked: Slurm sends a user's signal to all processes of the step.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, *_STOP_SIGNALS})
        self._channel = connect(plan["address"], rank=plan["rank"], host=plan["host"])

    def _note(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD and self._rank is None:
            self._missed.add(number)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def serve(self) -> dict[str, Any] | None:
        """Watch the rank and execute orders. Returns None when this process must exit. In a forked rank, returns the
        order that started it."""
        self._report(event="started", pid=self._rank, problem="")
        while True:
            self._reap()
            if self._channel is None and self._rank is None:
                return None
            sources = [self._woken, *([] if self._channel is None else [self._channel])]
            ready, _, _ = select.select(sources, [], [], self._pause_seconds())
            if self._woken in ready:
                self._woken.recv(4096)
            for order in self._orders() if self._channel in ready else ():
                if order["do"] == "start" and self._start(order):
                    return order
                if order["do"] == "end" or (order["do"] == "kill" and not self._kill()):
                    self._kill()
                    return None
                if order["do"] == "signal":
                    self._signal(order["number"])
            self._prepare()

    def _orders(self) -> list[dict[str, Any]]:
        assert self._channel is not None
        try:
            data = self._channel.recv(1 << 16)
        except OSError:
            data = b""
        return [json.loads(line) for line in self._lines.feed(data)] if data else [{"do": "end"}]

    def _report(self, **values: Any) -> None:
        if self._channel is not None:
            try:
                self._channel.sendall(json_line({"attempt": self._attempt, **values}))
            except OSError:
                pass  # the next read finds that the connection is closed

    def _reap(self) -> None:
        """Collect children that have ended, and report the end of the rank."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._rank:
                self._rank, self.status = None, status
                memory = out_of_memory_kills() != self._memory_kills
                self._report(event="ended", code=os.waitstatus_to_exitcode(status), memory=memory)

    def _signal(self, number: int) -> None:
        if self._rank is not None:
            try:
                os.kill(self._rank, number)
            except ProcessLookupError:
                pass  # its end is reported next

    def _kill(self) -> bool:
        """Kill the rank and the processes that it has started. Returns whether the rank has ended."""
        kill_descendants(self._reap)
        return self._rank is None

    # -- the next attempt -------------------------------------------------------------------------------------------

    def _start(self, order: dict[str, Any]) -> bool:
        """Start the rank of the next attempt. Returns True in a forked rank, which must become the program."""
        self._kill()
        self._attempt, self._memory_kills = order["attempt"], out_of_memory_kills()
        self._folder = order["environment"].get(RUN_DIR_VARIABLE, self._folder)
        if order["forget"]:
            self._missed.clear()
        problem = self._why_not_fork(order)
        me = os.getpid()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, about a fork beside threads of libraries
            child = os.fork()
        if child == 0:
            self._enter_rank(order, me)
            if problem or fork_is_bad():
                command = [self._plan["python"], *order["arguments"]]
                os.execvpe(command[0], command, os.environ)
            return True
        self._rank = child
        self._missed.clear()
        while (late := signal.sigtimedwait(_STOP_SIGNALS, 0)) is not None:  # arrived while there was no rank
            os.kill(child, late.si_signo)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._report(event="started", pid=child, problem=problem)
        return False

    def _enter_rank(self, order: dict[str, Any], parent: int) -> None:
        """Give this process the signal handling, session, files and environment of a rank. Nothing is imported here,
        since another thread of the parent may have held the lock of an import."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *_STOP_SIGNALS):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        die_with(parent)
        os.setsid()
        for one in (self._woken, self._wakeup, self._channel):
            if one is not None:
                one.close()
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)
        for name in order["unset"]:
            os.environ.pop(name, None)
        if self._folder is not None:
            os.environ[RUN_DIR_VARIABLE] = self._folder
        os.environ.update(order["environment"])
        for missed in self._missed:
            os.kill(os.getpid(), missed)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._plan["mask"])

    # -- imports ----------------------------------------------------------------------------------------------------

    def _why_not_fork(self, order: dict[str, Any]) -> str:
        """Why the next rank cannot be forked from this process; empty if it can. If its modules are not yet known, this
        process has another chance to import them."""
        if self._preload is None:
            self._pause = FIRST_LOOK_SECONDS
            self._look_at = time.monotonic() + self._pause
        if self._preload is None or not self._imported.is_set():
            return "the modules have not been imported yet"
        if self._problem or fork_is_bad():
            return self._problem or "CUDA has been initialised"
        return self._preload.why_not({**order["environment"], **dict.fromkeys(order["unset"])})

    def _pause_seconds(self) -> float | None:
        return (
            None if self._preload is not None or self._channel is None else max(0.0, self._look_at - time.monotonic())
        )

    def _prepare(self) -> None:
        """Begin to import the modules once they are known; report when this is done."""
        if self._imported.is_set() and not self._reported:
            self._reported = True
            self._report(event="warm", problem=self._problem)
        if self._preload is not None or self._channel is None or time.monotonic() < self._look_at:
            return
        if not self._is_bound and self._rank is not None and has_loaded(self._rank, *ONCE_A_STEP):
            self._is_bound = True
            self._report(event="bound")
        self._pause = min(2 * self._pause, LONGEST_LOOK_SECONDS)
        self._look_at = time.monotonic() + self._pause
        self._preload = self._wanted() if _has_memory() else None
        if self._preload is not None:
            threading.Thread(target=self._import, args=(self._preload,), daemon=True).start()

    def _wanted(self) -> Preload | None:
        """The modules to import; None if they are not yet known."""
        if self._plan["modules"] is not None:
            return Preload(self._plan["modules"])
        report = None if self._folder is None else read_json(RunDir(self._folder).imports(self._attempt))
        return None if report is None else Preload.of(report)

    def _import(self, preload: Preload) -> None:
        try:
            # Take little from the ranks if no core is idle. Forked ranks have the priority of the main thread.
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, nice + NICER))
        except OSError:
            pass  # it then competes with the rank for some seconds
        set_first_path(self._plan["arguments"])
        self._problem = preload.run()
        self._imported.set()
        self._wakeup.send(b"\0")
