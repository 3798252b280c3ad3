"""Keeps torch's data-loader workers alive when a job step gets SIGTERM.

Slurm sends the signal to every process of a step. A program that saves on SIGTERM still needs its workers: torch's
handler would end them, and the program would fail ("DataLoader worker (pid …) is killed by signal"). With this file, a
forked worker blocks SIGTERM, and one of its threads receives the signal. SIGTERM from the parent, which is how torch
ends its workers, ends the worker as torch's handler does. SIGTERM from other processes is ignored.

Python imports this file at startup in the ranks of a run with ``runtime.stop: signals``. The file uses only the
standard library. At its end it imports the environment's own ``sitecustomize``, if there is one.
"""

import os
import signal
import sys
import threading  # imported first, because its after-fork hook must run before this file's

PARENT_CHECK_SECONDS = 5.0
"""Interval at which a worker checks whether its parent is alive."""


def _shield_worker() -> None:
    if not _starts_worker():
        return
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_receive_signals, args=(parent,), name="hpcaccel-shield", daemon=True).start()


def _starts_worker() -> bool:
    """Whether a data loader forked this process: if so, the loader's frames are on the inherited stack."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.data.dataloader":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _receive_signals(parent: int) -> None:
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, PARENT_CHECK_SECONDS)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)


def _import_own_sitecustomize() -> None:
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
    _import_own_sitecustomize()
