"""Handing a run's script in: the job exists and is written down, or neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.backend import Backend
from hpcaccel.submission.deferred_signals import held_back
from hpcaccel.submission.submitit_pickles import call_of, launch_of, write_call

__all__ = ["hand_in"]


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
    for task in tasks:
        write_call(task)
    try:
        with held_back():
            executor._internal_process_submissions([DelayedSubmission(call_of(task)) for task in tasks])
            after(started[0])
    except BaseException:
        if started:
            backend.discard(run, started[0])
        raise
    return started[0]


def _ranks(run: RunDir) -> int:
    launch = launch_of(run)
    return int(launch["nodes"]) * int(launch["ranks_per_node"])
