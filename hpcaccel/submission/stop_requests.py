"""Requests from outside: a file in ``control/`` first, so that no supervisor brings back what somebody ended."""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

from hpcaccel.core.records import Reason, StopRequest, to_dict
from hpcaccel.core.run_dir import RunDir, SweepDir, WorkerDir, read_json, write_json
from hpcaccel.errors import RunDirectoryError, SlurmCommandError, UserError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission import local
from hpcaccel.submission.chain_jobs import cancel_waiting
from hpcaccel.submission.run_state import honoured_name, read_facts, read_record, read_worker_facts, waiting_links
from hpcaccel.submission.stale_jobs import left_in_queue, sentence_on
from hpcaccel.submission.status import RunStatus, status

__all__ = ["Then", "asked_as", "request_cancel", "request_stop"]

Then = Literal["pause", "requeue", "finish"]

_WAITING = ("pending", "requeued")
_ASKED_AS: ContextVar[str | None] = ContextVar("_ASKED_AS", default=None)


@contextmanager
def asked_as(name: str | None) -> Iterator[None]:
    """Requests to stop or cancel within the block bear ``name``. Whoever repeats one whose answer was lost asks for
    nothing new, even if the run has come back meanwhile.
    """
    token = _ASKED_AS.set(name)
    try:
        yield
    finally:
        _ASKED_AS.reset(token)


def request_stop(run: RunDir, *, then: Then, slurm: Slurm | None = None) -> None:
    """Ask a run (or all tasks of an array) to save and leave.

    Args:
        then: what follows: nothing until somebody resumes it (``pause``), it comes back through the queue
            (``requeue``), or the code behind the training loop runs and that is the end (``finish``).

    Raises:
        UserError: the run has ended, or it waits in the queue, where there is nothing to requeue or to finish; or
            its program is one that signals stop, which has no way to finish.
    """
    slurm = slurm or Slurm()
    now = status(run, slurm)
    left, active = _to_ask(run, now)
    if not any(left.values()):
        _refuse_stop(run, now, then)
    for one in _asked(run, active):
        if left[one.path] is None:
            _write(one, reason="stop", then=then)
    waits = any(one.state in _WAITING for one in now.tasks or [now])
    if then == "pause" and waits and active and read_record(run).backend == "slurm":
        # What has not started gives its place in the queue back. What starts at this moment reads the request.
        with _standing(run, "stop", now):
            cancel_waiting(slurm, [*_job_ids(active, whole=run), *_waiting(active)])


def _refuse_stop(run: RunDir, now: RunStatus, then: Then) -> None:
    """Raises UserError for what cannot be asked of it."""
    if now.ended:
        raise UserError(f"run {now.run_id} is {now.state}: there is nothing to stop")
    if now.state in _WAITING and then == "requeue":
        raise UserError(f"run {now.run_id} is {now.state}: it waits in the queue already")
    if now.state in _WAITING and then == "finish":
        raise UserError(
            f"run {now.run_id} is {now.state}: it has no training loop to leave. "
            f"Take it out of the queue with `hpcaccel stop {now.run_id}` or `hpcaccel cancel {now.run_id}`"
        )
    if then == "finish" and not _is_cooperative(_active(run, now)[0]):
        raise UserError(
            f"run {now.run_id} is stopped by signals (runtime.stop), which know no finish. "
            f"Let it come back later with `hpcaccel stop {now.run_id}`, or end it with `hpcaccel cancel {now.run_id}`"
        )


def request_cancel(run: RunDir, *, slurm: Slurm | None = None) -> None:
    """End a run (or all tasks of an array) for good.

    Raises:
        UserError: it has ended already.
    """
    slurm = slurm or Slurm()
    now = status(run, slurm)
    left, active = _to_ask(run, now)
    if now.ended and not any(left.values()):
        if not (waiting := left_in_queue(run, slurm)):
            raise UserError(f"run {now.run_id} is {now.state}: there is nothing to cancel")
        for entry in waiting:
            slurm.cancel(entry.job_id)  # older Slurm does not count one that is held after a requeue as pending
            warnings.warn(f"run {now.run_id} was {now.state} already; {sentence_on(entry)}: taken out", stacklevel=2)
        return
    for one in _asked(run, active):
        if left[one.path] is None:
            _write(one, reason="cancelled", then="cancel")
    if read_record(run).backend == "local":
        for one in active:
            local.terminate(one)
        return
    with _standing(run, "cancel", now):
        cancel_waiting(slurm, _waiting(active))  # first, so that none of them takes over
        for job_id in _job_ids(active, whole=run):
            slurm.cancel(job_id)


@contextmanager
def _standing(run: RunDir, what: Literal["stop", "cancel"], now: RunStatus) -> Iterator[None]:
    """Say of a Slurm that does not answer in the block that the request in the run's directory holds all the same."""
    try:
        yield
    except SlurmCommandError as error:
        words = (
            f"{error.stderr.strip() or 'no answer'}\nThe request to {what} {now.run_id} stands all the same, in the "
            "run's directory: what runs reads it there by itself, and a job that waits in the queue reads it when it "
            f"starts, and ends. To take it out of the queue, give `hpcaccel {what} {now.run_id}` once more when Slurm "
            "answers"
        )
        raise type(error)(error.command, error.returncode, words) from None


def _to_ask(run: RunDir, now: RunStatus) -> tuple[dict[Path, Literal["open", "honoured"] | None], list[RunDir]]:
    """What an earlier try of this very request has left, by the folders that get it, and the parts of the run that have
    not honoured it."""
    everything = [run.task(index) for index in range(len(now.tasks))] or [run]
    left = {one.path: _left(one) for one in _asked(run, everything)}
    return left, [one for one in _active(run, now) if left.get(one.path, left.get(run.path)) != "honoured"]


def _active(run: RunDir, now: RunStatus) -> list[RunDir]:
    if not now.tasks:
        return [run]
    return [run.task(index) for index, task in enumerate(now.tasks) if not task.ended]


def _asked(run: RunDir, active: list[RunDir]) -> list[RunDir]:
    """Whose control folder gets the request: a sweep's own one is read by all its workers."""
    return [run] if isinstance(run, SweepDir) else active


def _is_cooperative(run: RunDir) -> bool:
    launch: dict[str, str] = (read_json(run.spec) or {}).get("launch", {})
    return launch.get("stop") != "signals"


def _job_ids(active: Sequence[RunDir], *, whole: RunDir) -> list[str]:
    """The newest jobs of ``active``; of a whole array the job that holds its tasks, once."""
    facts = [read_worker_facts(run) if isinstance(run, WorkerDir) else read_facts(run) for run in active]
    job_ids = [job_id for fact in facts for job_id in (fact.job_id, *fact.unrecorded) if job_id]
    if not whole.is_task and whole not in active:
        job_ids = [job_id.partition("_")[0] for job_id in job_ids]
    return list(dict.fromkeys(job_ids))


def _waiting(active: Sequence[RunDir]) -> list[str]:
    return [job_id for run in active for job_id in waiting_links(read_record(run))]


def _left(run: RunDir) -> Literal["open", "honoured"] | None:
    """What has become of this very request, where an earlier try has left it with ``run``."""
    name = _ASKED_AS.get()
    if name is None:
        return None
    found = [one for one in os.listdir(run.control) if one.endswith(f"-{name}.json")]
    if not found:
        return None
    return "honoured" if all(one.startswith(honoured_name("")) for one in found) else "open"


def _write(run: RunDir, *, reason: Reason, then: Literal["pause", "requeue", "finish", "cancel"]) -> None:
    request = StopRequest(reason=reason, then=then, time=time.time())
    path = run.control / f"stop-{time.time_ns()}-{_ASKED_AS.get() or secrets.token_hex(2)}.json"
    try:
        write_json(path, to_dict(request))
    except OSError as error:
        raise RunDirectoryError(
            f"cannot leave a request for run {run.run_id} in {run.control}: {error.strerror}"
        ) from None
