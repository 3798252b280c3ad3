"""Ranks forked from this process: their environment, their signals, the call of the user's function, and their end.

A forked rank inherits from a notebook's kernel what it must not use: signal handlers, the event loop's descriptor for
signals, and streams that need a thread of the kernel (``rank_output``).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from hpcaccel.errors import RunFailed
from hpcaccel.runtime.launch_env import patch_environment
from hpcaccel.runtime.notebook_cells import with_cell_names
from hpcaccel.runtime.rank_output import RankOutput, rank_output

__all__ = ["elastic_ranks", "forked_ranks", "function_traceback", "run_as_rank"]

INTERRUPT_SECONDS = 5.0
"""How long interrupted ranks may take to end before they are killed."""
PARENT_POLL_SECONDS = 1.0
"""Interval at which a rank checks that the process that forked it still runs."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals for which torch's elastic agent installs handlers."""
_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@contextmanager
def forked_ranks(count: int, *, prefix: str | None = None) -> Iterator[RankOutput | None]:
    """Fork ranks inside the block. At its end no rank is left, and signal handlers and variables are as before.

    Args:
        count: number of ranks on this node.
        prefix: template of the text before each line of the ranks' output; see ``rank_output``.

    Yields:
        the last argument of :func:`run_as_rank`.
    """
    others = set(multiprocessing.active_children())
    with _without_launchers(), _fork_allowed(), _handlers_restored(), rank_output(count, prefix) as output:
        try:
            yield output
        finally:
            _end(set(multiprocessing.active_children()) - others)


def elastic_ranks(
    function: Callable[..., Any], args: Sequence[Any], *, log_line_prefix_template: str | None, **options: Any
) -> None:
    """Call the function in ranks that torch's elastic agent starts and restarts.

    Args:
        options: fields of torch's ``LaunchConfig``.

    Raises:
        RunFailed: a rank failed, or this process received SIGTERM, SIGHUP or SIGQUIT and has a handler for it.
        KeyboardInterrupt: this process was interrupted. The ranks have been interrupted, too, and have ended.
    """
    __tracebackhide__ = True  # from the error that a notebook shows
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:  # older versions of torch wait for 30 seconds
        options["shutdown_timeout"] = int(INTERRUPT_SECONDS)
    failure, received = "", None
    with forked_ranks(options["nproc_per_node"], prefix=log_line_prefix_template) as output:
        start = elastic_launch(LaunchConfig(start_method="fork", **options), entrypoint=run_as_rank)
        try:
            with patch_environment(fork_launched="1"), _failure_not_logged(but=options["max_restarts"] > 0):
                start(function, tuple(args), output)
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            failure = f"rank {rank} failed:\n{function_traceback(_callstack(first.error_file_data) or first.message)}"
        except SignalException as error:
            received = error.sigval
    # Raised here, not in the handlers above: the exception would keep torch's frames alive, and the frames the store
    # that listens on the port.
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    if received is not None:
        signal.raise_signal(received)
        failure = f"the ranks were stopped, because this process received {received.name}"
    if failure:
        raise RunFailed(failure)


@contextmanager
def _failure_not_logged(*, but: bool) -> Iterator[None]:
    """Drop the agent's log record of a rank's failure, because its traceback is in ``RunFailed``.

    Args:
        but: keep it, because a restart may follow.
    """
    log = logging.getLogger("torch.distributed.elastic.multiprocessing.api")

    def keep(record: logging.LogRecord) -> bool:
        return but or not str(record.msg).startswith("failed (exitcode")

    log.addFilter(keep)
    try:
        yield
    finally:
        log.removeFilter(keep)


def _callstack(error_file: Mapping[str, Any] | None) -> str:
    """The traceback in the error file that torch's ``record`` wrote."""
    found = (error_file or {}).get("message") or ""
    return str(found.get("extraInfo", {}).get("py_callstack") or found) if isinstance(found, Mapping) else str(found)


def run_as_rank(function: Callable[..., Any], args: tuple[Any, ...], output: RankOutput | None) -> None:
    """Call the function in this rank, then end the rank's session: a forked process runs no ``atexit`` handlers."""
    _reset_signals()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.pid,), name="hpcaccel-parent", daemon=True).start()
    if output is not None:
        output.connect_rank()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    function(*args)
    from hpcaccel.runtime.distributed.world import World
    from hpcaccel.runtime.training_session import TrainingSession

    session, world = TrainingSession.existing(), World.existing()
    if session is not None:
        session.end()
    elif world is not None:
        world.destroy()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        # The session handled these signals to stop at a step. There are no more steps, so they may end a waiting rank.
        signal.signal(number, signal.SIG_DFL)


_CALL = "function(*args)"
"""Source line in ``run_as_rank`` that calls the user's function. Frames after it in a traceback are the user's."""


def function_traceback(text: str) -> str:
    """``text``, a rank's traceback, without the frames of hpcaccel and torch that called the user's function, and with
    the numbers of a notebook's cells."""
    before, call, after = text.rstrip().partition(f"    {_CALL}\n")
    return with_cell_names(f"Traceback (most recent call last):\n{after}" if call else before)


def _end_after(parent: int | None) -> None:
    """End this rank when the process that forked it has been killed. torch then interrupts the rank, which has
    ``INTERRUPT_SECONDS`` to end by itself.

    Args:
        parent: process id.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    time.sleep(INTERRUPT_SECONDS)
    os._exit(1)


def _reset_signals() -> None:
    """Replace inherited signal handlers: the elastic agent's raise an ordinary exception, which a program may catch."""
    signal.set_wakeup_fd(-1)  # otherwise a rank's signals would wake the event loop of the notebook's kernel
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else _interrupt_once)


def _interrupt_once(number: int, frame: object) -> None:
    """Raise KeyboardInterrupt at the first SIGINT only: a notebook sends it to all its processes, and then the agent
    sends another one, which must not interrupt the function's clean-up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end(ranks: set[BaseProcess]) -> None:
    """Interrupt the ranks that are left, and kill those that have not ended after ``INTERRUPT_SECONDS``."""
    with _uninterrupted():
        for rank in ranks:
            _send(rank, signal.SIGINT)
        deadline = time.monotonic() + INTERRUPT_SECONDS
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        for rank in ranks:
            _send(rank, signal.SIGKILL)
            rank.join()


def _send(rank: BaseProcess, number: signal.Signals) -> None:
    if rank.is_alive() and rank.pid is not None:
        try:
            os.kill(rank.pid, number)
        except ProcessLookupError:
            pass  # it has just ended


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay SIGINT to the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """At the end of the block, restore the signal handlers, which torch's elastic agent replaces."""
    if threading.current_thread() is not threading.main_thread():  # where the agent installs none
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # otherwise a program in C has installed it
                signal.signal(number, handler)


@contextmanager
def _without_launchers() -> Iterator[None]:
    """Inside the block, remove the variables that a launcher of this process has set: the ranks would inherit them."""
    names = [name for name in os.environ if name in _LAUNCHERS or name.startswith("SLURM_STEP")]
    held = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)  # set by the agent
        os.environ.update(held)


@contextmanager
def _fork_allowed() -> Iterator[None]:
    """Silence the warning of Python 3.12 and newer about a fork with several threads: torch starts threads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        yield
