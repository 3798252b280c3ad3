"""Runs srun as a child process: forwards signals to the ranks, and returns srun's exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from hpcaccel.core.parent_death import dying_with_us
from hpcaccel.errors import SlurmCommandError
from hpcaccel.slurm import Slurm

__all__ = ["run_step"]

_PASSED_ON = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2
)  # fmt: skip
_BY_SRUN = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that srun passes to its tasks. It answers the others itself: SIGINT by a message, SIGTERM by a kill."""
_RETRY_SECONDS = 60.0
"""How long to try to send a signal to the ranks while Slurm does not respond."""
_PAUSE_SECONDS = 2.0


def run_step(command: Sequence[str], environ: Mapping[str, str], *, job_id: str, name: str) -> int:
    """Run srun until it exits, and forward this process's signals to the ranks. Returns srun's exit code.

    If this process is killed, the kernel sends srun SIGTERM, which ends the step. If srun is killed, this process ends
    the step.

    Args:
        command: srun and its arguments.
        name: the step's name in ``command``.
    """
    watched = {*_PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        return _follow(command, environ, watched, job_id=job_id, name=name)
    finally:
        while signal.sigtimedwait(watched, 0):
            pass  # the ranks have ended: a further signal must not replace their exit code
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _follow(
    command: Sequence[str], environ: Mapping[str, str], watched: set[signal.Signals], *, job_id: str, name: str
) -> int:
    srun = subprocess.Popen(
        command,
        env=dict(environ),
        preexec_fn=dying_with_us(signal.SIGTERM),
        start_new_session=True,  # a terminal sends Ctrl-C to this process only
    )
    undelivered: dict[signal.Signals, float] = {}  # by signal, the time of the last attempt
    next_attempt = 0.0
    while (code := srun.poll()) is None:
        received = signal.sigtimedwait(watched, 1.0)
        if received is not None and received.si_signo != signal.SIGCHLD:
            number = signal.Signals(received.si_signo)
            if number in _BY_SRUN:
                srun.send_signal(number)
            else:
                undelivered[number] = time.monotonic() + _RETRY_SECONDS
                next_attempt = 0.0
        if undelivered and time.monotonic() >= next_attempt:
            undelivered = _sent(undelivered, srun, job_id, name)
            next_attempt = time.monotonic() + _PAUSE_SECONDS
    if code == -signal.SIGKILL:
        _signal_ranks(job_id, name, signal.SIGKILL)
    return 128 - code if code < 0 else code


def _sent(
    signals: Mapping[signal.Signals, float], srun: subprocess.Popen[bytes], job_id: str, name: str
) -> dict[signal.Signals, float]:
    """Send signals to the ranks, and return those to try again, because Slurm does not respond.

    srun is terminated if the ranks have not begun, or if Slurm has not responded by a signal's last attempt. Not
    earlier: srun would kill the ranks at once, while they may be saving.
    """
    left = {}
    for number, last_attempt in signals.items():
        delivered = _signal_ranks(job_id, name, number)
        if delivered is None and time.monotonic() < last_attempt:
            left[number] = last_attempt
        elif not delivered:
            srun.terminate()
    return left


def _signal_ranks(job_id: str, name: str, number: signal.Signals) -> bool | None:
    """Send a signal to the ranks; False if their step has not begun or has ended, None if Slurm does not respond."""
    slurm = Slurm()
    try:
        step = slurm.step_named(job_id, name)
        return step is not None and slurm.signal_step(job_id, step, number.name.removeprefix("SIG"))
    except SlurmCommandError as error:
        print(f"hpcaccel launch: cannot send {number.name} to the ranks: {error}", file=sys.stderr)
        return None
