"""Keeps torch's data-loader workers alive when a job step gets SIGTERM.

Slurm sends the signal to every process of a step. A program that saves and leaves on it needs its workers for that:
torch's own handler would end them, and the program with "DataLoader worker is killed by signal". A forked worker
blocks SIGTERM instead, and a thread of it takes the signal: from the parent, which ends its workers in this way, it
ends the worker as torch's handler does; from anybody else it is dropped.

Python imports this file at its start, in the ranks of a run with ``runtime.stop: signals``. It needs nothing but the
standard library, and hands on to the ``sitecustomize`` of the environment, if there is one.
"""

import os
import signal
import sys
import threading  # first: its own hook for forked processes has to run before this one

LOOK_SECONDS = 5.0
"""How often a worker looks whether its parent still lives."""


def _shield_worker() -> None:
    if not _starts_worker():
        return
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_take_signals, args=(parent,), name="hpcaccel-shield", daemon=True).start()


def _starts_worker() -> bool:
    """Whether this fork was made by a data loader: a forked process has its parent's stack."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.data.dataloader":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _take_signals(parent: int) -> None:
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, LOOK_SECONDS)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)


def _hand_on() -> None:
    here, ours = os.path.dirname(os.path.abspath(__file__)), sys.modules.pop("sitecustomize", None)
    before = list(sys.path)
    sys.path[:] = [place for place in before if os.path.abspath(place) != here]
    try:
        __import__("sitecustomize")  # the environment's own
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.path[:] = before
        if ours is not None:
            sys.modules.setdefault("sitecustomize", ours)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_shield_worker)
if __name__ == "sitecustomize":
    _hand_on()
