"""Handing a run's script in: the job exists and is written down, or neither."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcaccel.errors import RunDirectoryError
from hpcaccel.rundir import RunDir, read_json
from hpcaccel.submission.backend import Backend
from hpcaccel.submission.calls import FUNCTION_FILE, FunctionCall, ProgramStub

__all__ = ["hand_in"]

_HELD_BACK = (signal.SIGINT, signal.SIGTERM)


def hand_in(
    run: RunDir,
    *,
    backend: Backend,
    indices: Sequence[int] | None,
    after: Callable[[str], None],
    text: str | None = None,
) -> str:
    """Submit the script of ``run`` through submitit and call ``after`` with the job id; both happen, or neither.

    Args:
        indices: the tasks to run, where ``run`` is the parent folder of an array.
        text: the script; None: the one that lies there.
    """
    from submitit.core.utils import DelayedSubmission

    from hpcaccel.submission.executor import RunExecutor

    started: list[str] = []

    def start(script: Path) -> str:
        started.append(backend.start(run, script, indices))
        return started[0]

    tasks = [run] if indices is None else [run.task(index) for index in indices]
    executor = RunExecutor(
        run,
        text=run.script.read_text(encoding="utf-8") if text is None else text,
        start=start,
        ranks=_ranks(tasks[0]),
        indices=indices,
    )
    try:
        with _uninterrupted():
            executor._internal_process_submissions([DelayedSubmission(_call(task)) for task in tasks])
            after(started[0])
    except BaseException:
        if started:
            backend.discard(run, started[0])
        raise
    return started[0]


def _ranks(run: RunDir) -> int:
    launch = _launch(run)
    return int(launch["nodes"]) * int(launch["ranks_per_node"])


def _call(run: RunDir) -> FunctionCall | ProgramStub:
    if _launch(run)["kind"] != "callable":
        return ProgramStub(str(run.path))
    code = run.code if run.code.exists() else None
    return FunctionCall(str(run.submitit / FUNCTION_FILE), None if code is None else str(code))


def _launch(run: RunDir) -> dict[str, Any]:
    document = read_json(run.spec)
    if document is None:
        raise RunDirectoryError(f"{run.spec} is missing: nothing can be submitted from {run.path}")
    launch: dict[str, Any] = document["launch"]
    return launch


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done, from us and from the commands that we start.

    It could leave a job behind that nobody knows of. What came meanwhile is delivered at the end of the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in _HELD_BACK}
    for number in before:
        signal.signal(number, lambda number, _: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)  # the commands inherit it; our other threads do not
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for late in heard:
            signal.raise_signal(late)
