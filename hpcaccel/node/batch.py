"""The batch step: a small process that starts a run's supervisor or a sweep's worker, and restarts a killed child.

By default Slurm does not requeue a job whose batch script has failed, so this process must survive and restart its
child. It forwards signals to the child, kills the processes that a killed child has left behind before it starts the
next one, and exits with the child's exit code.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpcaccel.core.parent_death import dying_with_us
from hpcaccel.core.process_identity import process_start
from hpcaccel.core.rank_protocol import EXIT_CONTINUED
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import HpcaccelError
from hpcaccel.node.notices.sender_process import SenderProcess

__all__ = [
    "KILLED",
    "MARK",
    "START_AGAIN",
    "WATCHED",
    "BatchStep",
    "began",
    "default_signals",
    "is_our_parent",
    "killed_by",
    "run_batch",
    "shell_code",
    "take_over_signals",
]

log = logging.getLogger(__name__)

WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGCHLD}
"""Signals that the batch step, supervisors and workers block and receive with ``sigwait`` or ``sigtimedwait``."""


def take_over_signals() -> None:
    """Restore the default handlers of USR2 and CHLD. Resend to this process the signals that arrived during set-up.

    The batch script ignores USR2, and children must not inherit this setting. The script's parent may ignore CHLD: a
    process that inherits this setting gets neither SIGCHLD nor the exit codes of its children."""
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for name in os.environ.pop("HPCACCEL_EARLY_SIGNALS", "").split():
        os.kill(os.getpid(), signal.Signals[f"SIG{name}"])


def default_signals() -> None:
    """Unblock all signals. Used as ``preexec_fn``: the supervisor blocks the signals that it waits for, and children
    must not inherit its signal mask."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def shell_code(code: int) -> int:
    """Convert an exit code of Popen (-n after signal n) to the shell's form (128 + n)."""
    return 128 - code if code < 0 else code


def srun_words(code: int) -> str:
    """How srun reports the end of a task with this exit code of Popen: ``Killed``, ``Exited with exit code 2``."""
    if code > 0:
        return f"Exited with exit code {code}"
    return (signal.strsignal(-code) or f"Signal {-code}").partition(" (")[0]


MARK = "HPCACCEL_BATCH"
"""Environment variable that all descendants of the batch step inherit. Its value is the batch step's process ID, its
start in clock ticks and its start in seconds since the epoch, separated by colons."""
KILLED = "HPCACCEL_KILLED"
"""Environment variable: number of the signal that killed the previous supervisor or worker."""
START_AGAIN = 86
"""Exit code of a child that requests a requeue on the local backend: the batch step runs the batch script again."""

STEADY_SECONDS = 60.0
"""A child that is killed within this time after its start counts as having died at its start."""
PAUSES_SECONDS = (0.0, 2.0, 10.0, 30.0)
"""Pauses before a restart, after one, two, three and four consecutive children that died at their start. After five of
these the batch step gives up."""
MOST_STARTS = 20
"""The batch step gives up if it has started this many children and the last one was killed."""
ORPHAN_SECONDS = 30.0
"""How long an orphaned srun may take to end its step; after that, srun is killed. The batch step then waits for up to
the same time again until all orphans have ended."""
_INTENTIONAL = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""Signals that are sent on purpose: a child killed by one of them is not restarted."""


def run_batch(run: RunDir, command: Sequence[str], *, give_up: Callable[[str], int]) -> int:
    """Run the batch step of ``run`` until its supervisor or worker has ended. Returns the batch step's exit code.

    Args:
        command: the child's arguments; the child runs the same program as this process.
        give_up: called with the reason, in a sentence, when children keep dying; returns the batch step's exit code.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    take_over_signals()
    program = [sys.executable, sys.argv[0]]
    since = time.time()

    def sender() -> SenderProcess | None:
        command = [*program, "notices", str(run.path)]
        return SenderProcess(command, unmarked=MARK, since=since) if _has_webhook(run) else None

    return BatchStep([*program, *command], script=run.script, give_up=give_up, sender=sender).run()


def _has_webhook(run: RunDir) -> bool:
    from hpcaccel.core.launch_spec import find_launch  # while the child starts, which would wait for this import

    try:
        launch = find_launch(run)
    except (HpcaccelError, OSError):
        return False  # the supervisor reports the error
    return launch is not None and launch.notify.sends


class BatchStep:
    """Starts the child, forwards signals to it, and restarts it if it is killed.

    Args:
        command: the child's command line: Python, the node program, ``supervise`` or ``work``, a directory, and for
            ``work`` the worker's index.
        script: the batch script, which a requeue on the local backend runs again.
        give_up: see ``run_batch``.
        sender: makes the sender of notices, or returns None; called once, after the first start of a child.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        script: Path,
        give_up: Callable[[str], int],
        sender: Callable[[], SenderProcess | None] | None = None,
    ) -> None:
        self._command = list(command)
        self._what = {"supervise": "supervisor", "work": "worker"}[command[2]]
        self._script = script
        self._give_up = give_up
        self._sender = sender
        self._notices: SenderProcess | None = None
        self._received: set[int] = set()
        """Signals received so far. Each new child gets all of them again, and asks the scheduler what they mean."""
        self._mark = f"{os.getpid()}:{process_start(os.getpid())}:{time.time()!r}"
        os.environ[MARK] = self._mark

    def run(self) -> int:
        code = self._run()
        self._end_notices(hurry=code == EXIT_CONTINUED)
        return code

    def _run(self) -> int:
        quick, starts = 0, 0
        while True:
            born = time.monotonic()
            starts += 1
            try:
                code = self._watch(self._start())
            except OSError as error:  # out of memory, or the limit on processes is reached
                self._keep_notices()
                end = f"could not be started: {error.strerror}"
            else:
                if code == START_AGAIN:
                    self._start_again()
                    continue
                if code >= 0 or -code in _INTENTIONAL:
                    return shell_code(code)
                end = f"was killed by signal {-code}"
                os.environ[KILLED] = str(-code)
            quick = 0 if time.monotonic() - born > STEADY_SECONDS else quick + 1
            self._end_orphans()
            if quick > len(PAUSES_SECONDS) or starts >= MOST_STARTS:
                how = f"the {self._what} failed {quick} times in a row within {STEADY_SECONDS:.0f} s of its start"
                if quick <= len(PAUSES_SECONDS):
                    how = f"the {self._what} was started {starts} times in this job and never finished"
                return self._give_up(f"{how}; the last time it {end}")
            pause = PAUSES_SECONDS[max(0, quick - 1)]
            when = f" in {pause:.0f} s" if pause else ""
            log.warning(f"the {self._what} {end}; restarting it{when}")
            self._wait(pause)

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(self._command, preexec_fn=dying_with_us(blocked=WATCHED))
        for number in self._received:
            child.send_signal(number)
        return child

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        """Forward signals until the child has ended. Returns the child's exit code, or -n if signal n killed it."""
        self._keep_notices()
        while (code := child.poll()) is None:
            number = signal.sigwait(WATCHED)
            if number != signal.SIGCHLD:
                self._received.add(number)
                child.send_signal(number)
            self._keep_notices()
        return code

    def _keep_notices(self) -> None:
        if self._sender is not None:
            self._notices, self._sender = self._sender(), None
        if self._notices is not None:
            self._notices.keep()

    def _end_notices(self, *, hurry: bool) -> None:
        """Let the sender of notices deliver what is left, for a limited time, which is short if Slurm ends the job."""
        if self._notices is not None:
            taken = bool((self._received | signal.sigpending()) & {signal.SIGTERM, signal.SIGINT})
            self._notices.end(hurry=hurry or taken)

    def _wait(self, seconds: float) -> None:
        """Wait ``seconds``, or until a signal other than SIGCHLD arrives. The next child gets that signal."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            received = signal.sigtimedwait(WATCHED, left)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._received.add(received.si_signo)
                return

    def _end_orphans(self) -> None:
        """Kill the processes that a dead child has left on this node. An srun whose parent dies ends its step and then
        exits. It gets time to do so, because the step would remain if srun were killed."""
        end = time.monotonic() + ORPHAN_SECONDS
        while orphans := list(_marked(self._mark)):
            late = time.monotonic() > end
            for pid in orphans:
                if late or not _is_srun(pid):
                    _kill(pid)
            if late and time.monotonic() > end + ORPHAN_SECONDS:
                log.warning(f"cannot kill processes of the previous {self._what}: {', '.join(map(str, orphans))}")
                return
            self._wait(0.1)

    def _start_again(self) -> None:
        """Replace this process with the batch script. Returns only if the job has been cancelled in the meantime: then
        the next child gets the signal and writes the end line."""
        os.environ["HPCACCEL_RESTART_COUNT"] = str(int(os.environ.get("HPCACCEL_RESTART_COUNT", "0")) + 1)
        os.environ.pop(KILLED, None)
        if (self._received | signal.sigpending()) & {signal.SIGTERM, signal.SIGINT}:
            return
        self._end_notices(hurry=True)
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvpe("bash", ["bash", str(self._script)], environment)


def killed_by() -> str:
    """Number of the signal that killed the previous supervisor or worker of this batch step; empty if none was killed.
    Removes the environment variable."""
    return os.environ.pop(KILLED, "")


def began() -> tuple[int, float] | None:
    """Returns the process ID and the start (seconds since the epoch) of the batch step of which this process is a
    descendant; None if there is no batch step."""
    if (mark := os.environ.get(MARK)) is None:
        return None
    pid, _, moment = mark.split(":")
    return int(pid), float(moment)


def is_our_parent() -> bool:
    """Whether this process is the child that the batch step watches."""
    mark = began()
    return mark is not None and mark[0] == os.getppid()


def _marked(mark: str) -> Iterator[int]:
    """Yield the IDs of the processes on this node that have inherited ``mark``, except this process; see proc(5)."""
    wanted = f"{MARK}={mark}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = Path(entry.path, "environ").read_bytes()
        except OSError:
            continue  # another user's process, or it has ended
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
