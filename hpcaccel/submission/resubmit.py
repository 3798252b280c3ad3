"""Going on with a run: a new job with the same script in the same directory, from the newest checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from hpcaccel.core.run_dir import RunDir, read_json, register
from hpcaccel.errors import RunBusy, SlurmCommandError, SlurmUnreachable, UserError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.job_dependencies import tell_dependents
from hpcaccel.submission.backend import SlurmBackend, backend_named
from hpcaccel.submission.chain_jobs import cancel_waiting
from hpcaccel.submission.idempotent_resume import Turn
from hpcaccel.submission.recording import ledger_sizes, record_job
from hpcaccel.submission.recovery import owner, perhaps_resumed, take_up
from hpcaccel.submission.run_state import honoured_name, open_requests, read_record, waiting_links
from hpcaccel.submission.secret_values import bring_secrets
from hpcaccel.submission.stale_jobs import left_in_queue
from hpcaccel.submission.status import RunStatus, status
from hpcaccel.submission.submit_script import hand_in

__all__ = ["resume"]


def resume(run: RunDir, *, slurm: Slurm | None = None) -> str:
    """Submit a new job for a run that is paused, failed, cancelled or lost; of an array, for all such tasks.

    Where an earlier resume was killed after it had handed its job in, that job is the one.

    Returns:
        The new job id.

    Raises:
        RunBusy: something is still going to happen to it by itself.
        UserError: it is completed.
    """
    parent = owner(run)
    with Turn(parent, slurm=slurm) as turn:
        if take_up(turn) and not status(run, slurm).ended:
            job_id = read_record(parent).job_ids[-1]
        else:
            job_id = _hand_in_anew(run, turn, slurm)
    record = read_record(parent)
    register(parent, name=record.name, job_id=job_id)
    if record.backend == "slurm":
        for problem in tell_dependents(slurm or Slurm(), parent):
            warnings.warn(problem, stacklevel=2)
    return job_id


def _hand_in_anew(run: RunDir, turn: Turn, slurm: Slurm | None) -> str:
    record = read_record(run)
    backend = turn.holding(backend_named(record.backend, slurm))
    indices = _resumable(status(run, slurm), run)
    backend.check()
    tasks = [run] if indices is None else [turn.run.task(index) for index in indices]
    document = read_json(tasks[0].spec) or {}
    bring_secrets(document["spec"]["environment"]["secrets"], run_id=run.run_id)
    stale = [(task, name) for task in tasks for name, _ in open_requests(task)]
    offsets = ledger_sizes(tasks)

    def write_down(job_id: str) -> None:
        record_job(turn.run, job_id, indices=indices, offsets=offsets, backend=backend)
        turn.done()

    if isinstance(backend, SlurmBackend):
        cancel_waiting(backend.slurm, waiting_links(record))  # those of the old chain, if any are left
        for entry in left_in_queue(run, backend.slurm):
            backend.slurm.cancel(entry.job_id)
    for task, name in stale:
        (task.control / name).rename(task.control / honoured_name(name))
    try:
        turn.begin(indices=indices)
        return hand_in(turn.run, backend=backend, indices=indices, after=write_down)
    except SlurmCommandError as error:
        if isinstance(error, SlurmUnreachable):
            _restore(stale)
            raise
        raise perhaps_resumed(error, run) from None
    except BaseException:
        _restore(stale)
        raise


def _restore(stale: Sequence[tuple[RunDir, str]]) -> None:
    """Earlier requests to stop stand again."""
    for task, name in stale:
        (task.control / honoured_name(name)).rename(task.control / name)


def _resumable(now: RunStatus, run: RunDir) -> list[int] | None:
    """The tasks to go on with; None for a run that is no part of an array."""
    if not now.ended:
        raise RunBusy(
            f"run {now.run_id} is {now.state}: it goes on by itself. Stop it first with `hpcaccel stop {now.run_id}`"
        )
    if now.state == "completed":
        raise UserError(f"run {now.run_id} is completed: there is nothing to go on with")
    if now.tasks:
        return [index for index, task in enumerate(now.tasks) if task.state != "completed"]
    return [int(run.path.name)] if run.is_task else None
