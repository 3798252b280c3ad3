"""Stop, save, cancel and resume a run.

Stop and cancel write a request to the run's ``control/`` first, so that no supervisor requeues a run that a user ended.
A resume submits a new job, which runs the same script in the same directory and starts from the newest checkpoint.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

from hpcaccel.core import stop_requests
from hpcaccel.core.durable_files import read_json
from hpcaccel.core.launch_spec import find_launch
from hpcaccel.core.records import Reason
from hpcaccel.core.registered_runs import register
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import StopRequest, leave_request, mark_honoured, open_requests, reopen, request_state
from hpcaccel.core.sweep_dir import SweepDir, WorkerDir
from hpcaccel.errors import RunBusy, SlurmCommandError, UserError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.job_dependencies import update_dependents
from hpcaccel.submission.jobs import local
from hpcaccel.submission.jobs.backend import SlurmBackend, backend_named
from hpcaccel.submission.jobs.job_submission import JobSubmission, may_have_job
from hpcaccel.submission.jobs.recovery import recover_interrupted, submission_dir
from hpcaccel.submission.jobs.run_state import (
    cancel_waiting,
    read_facts,
    read_record,
    read_worker_facts,
    waiting_links,
)
from hpcaccel.submission.runs.run_owner import is_of_another_user, owner_of, say_that_requested
from hpcaccel.submission.runs.scheduler_state import left_in_queue, sentence_on
from hpcaccel.submission.runs.status import RunStatus, status

__all__ = [
    "Then",
    "named_requests",
    "request_cancel",
    "request_name",
    "request_save",
    "request_stop",
    "resume",
]


Then = Literal["pause", "requeue", "finish"]

_WAITING = ("pending", "requeued")
_REQUEST_NAME: ContextVar[str | None] = ContextVar("_REQUEST_NAME", default=None)


@contextmanager
def named_requests(name: str | None) -> Iterator[None]:
    """Context manager that marks the stop and cancel requests made in the block with ``name``.

    A request that is repeated under the same name because its reply was lost has no second effect, even if the run was
    resumed in the meantime.
    """
    token = _REQUEST_NAME.set(name)
    try:
        yield
    finally:
        _REQUEST_NAME.reset(token)


def request_name() -> str | None:
    """The name that :func:`named_requests` gives to requests; None outside of its block."""
    return _REQUEST_NAME.get()


def request_stop(run: RunDir, *, then: Then, slurm: Slurm | None = None) -> None:
    """Request that a run (or all tasks of an array) save and exit.

    Args:
        then: ``pause``: the run stays stopped until resumed; ``requeue``: it returns to the queue; ``finish``: the
            code after the training loop runs, and the run ends.

    Raises:
        UserError: the run has ended; or ``then`` is ``requeue`` or ``finish`` and the run is in the queue; or ``then``
            is ``finish`` and the program is stopped by signals.
        ClusterError, SlurmCommandError: Slurm refused to cancel pending jobs, or did not respond. The request is
            saved and takes effect when a job of the run is running.
    """
    slurm = slurm or Slurm()
    now = status(run, slurm)
    left, active = _targets(run, now)
    if not any(left.values()):
        _refuse_stop(run, now, then)
    for one in _request_places(run, active):
        if left[one.path] is None:
            _write(one, reason="stop", then=then)
    if is_of_another_user(run):
        say_that_requested(run, pending=_any_waits(now))
        return
    waits = _any_waits(now)
    if then == "pause" and waits and active and read_record(run).backend == "slurm":
        # Pending jobs leave the queue. A job that starts at this moment reads the request.
        with _request_saved(run, "stop", now):
            cancel_waiting(slurm, [*_job_ids(active, whole=run), *_waiting(active)])


def _refuse_stop(run: RunDir, now: RunStatus, then: Then) -> None:
    """Raises UserError for a request that the run cannot fulfil."""
    if now.ended:
        raise UserError(f"run {now.run_id} is {now.state}: there is nothing to stop")
    if now.state in _WAITING and then == "requeue":
        raise UserError(f"run {now.run_id} is {now.state}: it is already queued")
    if now.state in _WAITING and then == "finish":
        raise UserError(
            f"run {now.run_id} is {now.state}: its training loop is not running. "
            f"Remove it from the queue with `hpcaccel stop {now.run_id}` or `hpcaccel cancel {now.run_id}`"
        )
    if then == "finish" and not _is_cooperative(_active(run, now)[0]):
        raise UserError(
            f"run {now.run_id} has runtime.stop: signals, which does not support {then!r}. "
            f"Pause it with `hpcaccel stop {now.run_id}`, or cancel it with `hpcaccel cancel {now.run_id}`"
        )


def request_save(run: RunDir, *, slurm: Slurm | None = None) -> None:
    """Request that a run (or all running tasks of an array) save a checkpoint, all ranks after the same step.

    Raises:
        UserError: no training of the run is running; or its program saves by itself.
    """
    now = status(run, slurm or Slurm())
    if isinstance(run, SweepDir):
        raise UserError(f"{now.run_id} is a sweep: save its trials one by one with `hpcaccel save TRIAL`")
    parts = [(run.task(index), task) for index, task in enumerate(now.tasks)] or [(run, now)]
    training = [one for one, part in parts if part.state == "running"]
    if not training:
        raise UserError(f"run {now.run_id} is {now.state}: there is nothing to save")
    if not _is_cooperative(training[0]):
        raise UserError(f"run {now.run_id} has runtime.stop: signals: its program decides when to save")
    for one in training:
        stop_requests.leave_save_request(one)


def request_cancel(run: RunDir, *, slurm: Slurm | None = None) -> None:
    """Cancel a run (or all tasks of an array), without a requeue. The run can be resumed later.

    Raises:
        UserError: the run has already ended, and none of its jobs is left in the queue.
        ClusterError, SlurmCommandError: Slurm refused to cancel a job, or did not respond. If the run has not ended,
            the request is saved and takes effect when a job of the run is running.
    """
    slurm = slurm or Slurm()
    now = status(run, slurm)
    left, active = _targets(run, now)
    if now.ended and not any(left.values()):
        if not (waiting := left_in_queue(run, slurm)):
            raise UserError(f"run {now.run_id} is {now.state}: there is nothing to cancel")
        for entry in waiting:
            slurm.cancel(entry.job_id)  # older Slurm does not count a job that is held after a requeue as pending
            warnings.warn(
                f"run {now.run_id} has already ended ({now.state}), but {sentence_on(entry)}. The job was cancelled",
                stacklevel=2,
            )
        return
    for one in _request_places(run, active):
        if left[one.path] is None:
            _write(one, reason="cancelled", then="cancel")
    if is_of_another_user(run):
        say_that_requested(run, pending=_any_waits(now))
        return
    if read_record(run).backend == "local":
        for one in active:
            local.terminate(one)
        return
    with _request_saved(run, "cancel", now):
        cancel_waiting(slurm, _waiting(active))  # followers first, so that none starts
        for job_id in _job_ids(active, whole=run):
            slurm.cancel(job_id)


def _any_waits(now: RunStatus) -> bool:
    return any(one.state in _WAITING for one in now.tasks or [now])


@contextmanager
def _request_saved(run: RunDir, what: Literal["stop", "cancel"], now: RunStatus) -> Iterator[None]:
    """If Slurm does not respond in the block, add to the error that the request is saved in the run directory."""
    try:
        yield
    except SlurmCommandError as error:
        words = (
            f"{error.stderr.strip() or 'no response'}\nThe request to {what} {now.run_id} is saved in the run "
            "directory. A running job reads it there; a pending job reads it when it starts, and then exits. To remove "
            f"a pending job from the queue, run `hpcaccel {what} {now.run_id}` again when Slurm responds"
        )
        raise type(error)(error.command, error.returncode, words) from None


def _targets(run: RunDir, now: RunStatus) -> tuple[dict[Path, Literal["open", "honoured"] | None], list[RunDir]]:
    """Returns the state of this request by directory, and the active parts of the run that have not honoured it.

    The states are those that an earlier try of the same request has left.
    """
    everything = [run.task(index) for index in range(len(now.tasks))] or [run]
    left = {one.path: _left(one) for one in _request_places(run, everything)}
    return left, [one for one in _active(run, now) if left.get(one.path, left.get(run.path)) != "honoured"]


def _active(run: RunDir, now: RunStatus) -> list[RunDir]:
    if not now.tasks:
        return [run]
    return [run.task(index) for index, task in enumerate(now.tasks) if not task.ended]


def _request_places(run: RunDir, active: list[RunDir]) -> list[RunDir]:
    """The runs whose ``control/`` gets the request. For a sweep, only its own ``control/``, which all workers read."""
    return [run] if isinstance(run, SweepDir) else active


def _is_cooperative(run: RunDir) -> bool:
    launch = find_launch(run)
    return launch is None or launch.cooperative


def _job_ids(active: Sequence[RunDir], *, whole: RunDir) -> list[str]:
    """The newest jobs of ``active``; for a whole array, the array's job id instead of those of its tasks."""
    facts = [read_worker_facts(run) if isinstance(run, WorkerDir) else read_facts(run) for run in active]
    job_ids = [job_id for fact in facts for job_id in (fact.job_id, *fact.unrecorded) if job_id]
    if not whole.is_task and whole not in active:
        job_ids = [job_id.partition("_")[0] for job_id in job_ids]
    return list(dict.fromkeys(job_ids))


def _waiting(active: Sequence[RunDir]) -> list[str]:
    return [job_id for run in active for job_id in waiting_links(read_record(run))]


def _left(run: RunDir) -> Literal["open", "honoured"] | None:
    """The state of this request in ``run`` if an earlier try wrote it, else None."""
    name = _REQUEST_NAME.get()
    return None if name is None else request_state(run, name)


def _write(run: RunDir, *, reason: Reason, then: Literal["pause", "requeue", "finish", "cancel"]) -> None:
    leave_request(run, StopRequest(reason=reason, then=then, time=time.time()), name=_REQUEST_NAME.get())


def resume(run: RunDir, *, slurm: Slurm | None = None) -> str:
    """Submit a new job for a run that is paused, failed, cancelled or lost; for an array, for all such tasks.

    If an earlier resume was killed after it had submitted its job, that job is recorded and no other is submitted.

    Returns:
        The new job id.

    Raises:
        RunBusy: the run has not ended, or will be requeued.
        UserError: the run is completed, or one of its secrets is not set in this environment.
        ClusterError: this machine has no Slurm, or Slurm refused the job.
        SlurmCommandError: Slurm did not respond.
    """
    if is_of_another_user(run):
        raise UserError(
            f"run {run.run_id} belongs to {owner_of(run)}, and only its owner can submit its jobs. Continue it as a "
            f"run of your own, from its newest checkpoint: hpcaccel resume {run.path}"
        )
    parent = submission_dir(run)
    with JobSubmission(parent, slurm=slurm) as submission:
        if recover_interrupted(submission) and not status(run, slurm).ended:
            job_id = read_record(parent).job_ids[-1]
        else:
            job_id = _submit_again(run, submission, slurm)
    record = read_record(parent)
    register(parent, name=record.name, job_id=job_id)
    if record.backend == "slurm":
        for problem in update_dependents(slurm or Slurm(), parent):
            warnings.warn(problem, stacklevel=2)
    return job_id


def _submit_again(run: RunDir, submission: JobSubmission, slurm: Slurm | None) -> str:
    from hpcaccel.submission.entrypoint.entry import bring_secrets  # imports pydantic, which status does not need

    record = read_record(run)
    backend = submission.holding(backend_named(record.backend, slurm))
    indices = _resumable(status(run, slurm), run)
    backend.check()
    tasks = [run] if indices is None else [submission.run.task(index) for index in indices]
    document = read_json(tasks[0].spec) or {}
    bring_secrets(document["spec"]["environment"]["secrets"], run_id=run.run_id)
    stale = [(task, name) for task in tasks for name, _ in open_requests(task, of_users=True)]
    if isinstance(backend, SlurmBackend):
        cancel_waiting(backend.slurm, waiting_links(record))  # jobs of the old chain
        for entry in left_in_queue(run, backend.slurm):
            backend.slurm.cancel(entry.job_id)
    for task, name in stale:
        mark_honoured(task, name)
    try:
        submission.write_intent(indices=indices)
        return submission.submit(backend, again="Another resume")
    except BaseException as error:
        if not may_have_job(error):
            _restore(stale)
        raise


def _restore(stale: Sequence[tuple[RunDir, str]]) -> None:
    """Make earlier stop requests valid again."""
    for task, name in stale:
        reopen(task, name)


def _resumable(now: RunStatus, run: RunDir) -> list[int] | None:
    """Indices of the tasks to resume; None for a run that is neither an array nor part of one."""
    if not now.ended:
        raise RunBusy(
            f"run {now.run_id} is {now.state}: it has not ended. Stop it first with `hpcaccel stop {now.run_id}`"
        )
    if now.state == "completed":
        raise UserError(f"run {now.run_id} is completed: there is nothing to resume")
    if now.tasks:
        return [index for index, task in enumerate(now.tasks) if task.state != "completed"]
    return [int(run.path.name)] if run.is_task else None
