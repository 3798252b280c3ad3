"""The batch step: a small process that starts a run's supervisor, or the host of a sweep's worker, and starts it again
when somebody kills it.

Slurm does not requeue a job whose batch script has failed. A small parent has to survive, so that it can restart the
child. It hands signals on, ends what a killed child has left behind before it starts another one, and takes
the child's exit code as its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpcaccel.core.process_identity import process_start
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.child_processes import WATCHED, dying_with_us, shell_code, take_over_signals

__all__ = ["KILLED", "MARK", "START_AGAIN", "Batch", "began", "is_our_parent", "killed_by", "run_batch"]

MARK = "HPCACCEL_BATCH"
"""Variable: ``<process id>:<its start in clock ticks>:<seconds since the epoch>`` of the batch step that a process
belongs to. All its descendants inherit it."""
KILLED = "HPCACCEL_KILLED"
"""Variable: the signal that ended the supervisor or host before this one."""
START_AGAIN = 86
"""A child's exit code on the local backend: run the batch script again, which is this backend's requeue."""

STEADY_SECONDS = 60.0
"""A child that has lived for so long has not died at once."""
PAUSES_SECONDS = (0.0, 2.0, 10.0, 30.0)
"""Before another start, by the number of children that have died at once in a row; after that none is started here."""
MOST_STARTS = 20
ORPHAN_SECONDS = 30.0
"""How long srun may take to end its step, and other processes to end after SIGKILL."""
_MEANT = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Whoever sends these to a child wants it to leave."""


def run_batch(run: RunDir, command: Sequence[str], *, give_up: Callable[[str], int]) -> int:
    """Be the batch step of ``run`` until its supervisor or host has ended; the batch step's exit code.

    Args:
        command: words for this very program that start the child.
        give_up: called with the reason, in a sentence, when children keep dying; its exit code is the batch step's.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    take_over_signals()
    return Batch([sys.executable, sys.argv[0], *command], script=run.script, give_up=give_up).run()


class Batch:
    """
    Args:
        command: starts a child: Python, the node program, ``supervise`` or ``work``, a directory.
        script: the batch script.
    """

    def __init__(self, command: Sequence[str], *, script: Path, give_up: Callable[[str], int]) -> None:
        self._command = list(command)
        self._what = {"supervise": "supervisor", "work": "host"}[command[2]]
        self._script = script
        self._give_up = give_up
        self._heard: set[int] = set()
        """Signals so far: a new child hears those that a dead one has heard, and asks what they mean."""
        self._mark = f"{os.getpid()}:{process_start(os.getpid())}:{time.time()!r}"
        os.environ[MARK] = self._mark

    def run(self) -> int:
        quick, starts = 0, 0
        while True:
            born = time.monotonic()
            starts += 1
            try:
                code = self._watch(self._start())
            except OSError as error:  # no memory or no process left for it
                end = f"could not be started: {error.strerror}"
            else:
                if code == START_AGAIN:
                    self._start_again()
                    continue
                if code >= 0 or -code in _MEANT:
                    return shell_code(code)
                end = f"was killed by signal {-code}"
                os.environ[KILLED] = str(-code)
            quick = 0 if time.monotonic() - born > STEADY_SECONDS else quick + 1
            self._end_orphans()
            if quick > len(PAUSES_SECONDS) or starts >= MOST_STARTS:
                how = f"{quick} {self._what}s in a row ended within {STEADY_SECONDS:.0f} s of their start"
                if quick <= len(PAUSES_SECONDS):
                    how = f"{starts} {self._what}s ended in this job before their work was done"
                return self._give_up(f"{how}; the last one {end}")
            pause = PAUSES_SECONDS[max(0, quick - 1)]
            when = f" in {pause:.0f} s" if pause else ""
            _say(f"the {self._what} {end}; starting another one{when}")
            self._wait(pause)

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(self._command, preexec_fn=dying_with_us(deaf_to=WATCHED))
        for number in self._heard:
            child.send_signal(number)
        return child

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        """Hand signals on until the child has ended; its exit code, -n for signal n."""
        while (code := child.poll()) is None:
            number = signal.sigwait(WATCHED)
            if number != signal.SIGCHLD:
                self._heard.add(number)
                child.send_signal(number)
        return code

    def _wait(self, seconds: float) -> None:
        """Until the time is over, or somebody sends a signal, which is the next child's."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            received = signal.sigtimedwait(WATCHED, left)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._heard.add(received.si_signo)
                return

    def _end_orphans(self) -> None:
        """Kill what a dead child has left on this node. An srun ends by itself, with its step, since its parent is
        dead; killed it would leave the step behind."""
        end = time.monotonic() + ORPHAN_SECONDS
        while orphans := list(_marked(self._mark)):
            late = time.monotonic() > end
            for pid in orphans:
                if late or not _is_srun(pid):
                    _kill(pid)
            if late and time.monotonic() > end + ORPHAN_SECONDS:
                _say(f"processes that cannot be killed: {', '.join(map(str, orphans))}")
                return
            self._wait(0.1)

    def _start_again(self) -> None:
        """Run the batch script again. Where somebody has cancelled the job meanwhile, return: the next child hears that
        and writes it down."""
        os.environ["HPCACCEL_RESTART_COUNT"] = str(int(os.environ.get("HPCACCEL_RESTART_COUNT", "0")) + 1)
        os.environ.pop(KILLED, None)
        if (self._heard | signal.sigpending()) & {signal.SIGTERM, signal.SIGINT}:
            return
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvpe("bash", ["bash", str(self._script)], environment)


def killed_by() -> str:
    """The signal that ended the supervisor or host before this one in the same batch step; empty for the first one."""
    return os.environ.pop(KILLED, "")


def began() -> tuple[int, float] | None:
    """Which process is the batch step, and when it began (seconds since the epoch), as its descendants know it."""
    if (mark := os.environ.get(MARK)) is None:
        return None
    pid, _, moment = mark.split(":")
    return int(pid), float(moment)


def is_our_parent() -> bool:
    """Whether this process is the child that the batch step watches."""
    mark = began()
    return mark is not None and mark[0] == os.getppid()


def _marked(mark: str) -> Iterator[int]:
    """Processes of this node that belong to the batch step, without itself, see proc(5)."""
    wanted = f"{MARK}={mark}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = Path(entry.path, "environ").read_bytes()
        except OSError:
            continue  # another user's, or gone
        if wanted in environment.split(b"\0"):
            yield int(entry.name)


def _is_srun(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "srun"
    except OSError:
        return False


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _say(text: str) -> None:
    try:
        print(f"hpcaccel: {time.strftime('%Y-%m-%dT%H:%M:%S')} {text}", flush=True)
    except OSError:
        pass  # the disk with the job's output is full
