"""Going on with a run: a new job with the same script in the same directory, from the newest checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

from hpcaccel.errors import RunBusy, UserError
from hpcaccel.rundir import RunDir, read_json, register
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.dependencies import tell_dependents
from hpcaccel.submission.backend import Backend, SlurmBackend, backend_named
from hpcaccel.submission.chain import cancel_waiting, links_behind
from hpcaccel.submission.facts import honoured_name, open_requests, read_record, waiting_links, write_record
from hpcaccel.submission.handin import hand_in
from hpcaccel.submission.resume_once import Turn
from hpcaccel.submission.secrets import bring_secrets
from hpcaccel.submission.status import RunStatus, status

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
    parent = _parent(run)
    with Turn(parent, slurm=slurm) as turn:
        if _takes_up_an_earlier_one(turn) and not status(run, slurm).ended:
            job_id = read_record(parent).job_ids[-1]
        else:
            job_id = _hand_in_anew(run, turn, slurm)
    record = read_record(parent)
    register(parent, name=record.name, job_id=job_id)
    if record.backend == "slurm":
        for problem in tell_dependents(slurm or Slurm(), parent):
            warnings.warn(problem, stacklevel=2)
    return job_id


def _takes_up_an_earlier_one(turn: Turn) -> bool:
    """Write down what a resume that was killed could not; whether it had handed a job in."""
    earlier = turn.interrupted()
    if earlier is None:
        return False
    came_through = turn.is_written_down(earlier)
    if not came_through and (jobs := turn.handed_in(earlier)):
        backend = backend_named(read_record(turn.run).backend, turn.slurm)
        tasks = [turn.run] if earlier.indices is None else [turn.run.task(index) for index in earlier.indices]
        cancel_waiting(turn.slurm, jobs[1:])  # a beginning of its chain, which is made anew
        _recorder(turn.run, tasks, earlier.offsets, earlier.indices, backend)(jobs[0])
        came_through = True
    turn.done()
    return came_through


def _hand_in_anew(run: RunDir, turn: Turn, slurm: Slurm | None) -> str:
    record = read_record(run)
    backend = backend_named(record.backend, turn.slurm)
    indices = _resumable(status(run, slurm), run)
    backend.check()
    tasks = [run] if indices is None else [turn.run.task(index) for index in indices]
    document = read_json(tasks[0].spec) or {}
    bring_secrets(document["spec"]["environment"]["secrets"], run_id=run.run_id)
    stale = [(task, name) for task in tasks for name, _ in open_requests(task)]
    offsets = [task.ledger.stat().st_size if task.ledger.exists() else 0 for task in tasks]
    for task, name in stale:
        (task.control / name).rename(task.control / honoured_name(name))
    try:
        if isinstance(backend, SlurmBackend):
            cancel_waiting(backend.slurm, waiting_links(record))  # those of the old chain, if any are left
        turn.begin(indices=indices, offsets=offsets)
        after = _recorder(turn.run, tasks, offsets, indices, backend)
        return hand_in(turn.run, backend=backend, indices=indices, after=after)
    except BaseException:
        for task, name in stale:
            (task.control / honoured_name(name)).rename(task.control / name)
        raise


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


def _parent(run: RunDir) -> RunDir:
    """Where the batch script lies: of a task the array's folder."""
    return RunDir(run.path.parent.parent) if run.is_task else run


def _recorder(
    parent: RunDir, tasks: Sequence[RunDir], offsets: Sequence[int], indices: Sequence[int] | None, backend: Backend
) -> Callable[[str], None]:
    def record_job(job_id: str) -> None:
        for place, task in enumerate(tasks):
            own = job_id if indices is None else f"{job_id}_{indices[place]}"
            with links_behind(task, own, backend=backend) as links:
                _append_job(task, own, ledger_offset=offsets[place], links=links)
        if indices is not None:
            _append_job(parent, job_id, ledger_offset=0)

    return record_job


def _append_job(run: RunDir, job_id: str, *, ledger_offset: int, links: Sequence[str] = ()) -> None:
    record = read_record(run)
    before = [one for one in record.job_ids if one != job_id]  # a resume that was killed may have come so far
    job_ids = [*before, job_id]
    write_record(run, replace(record, job_ids=job_ids, links=list(links), ledger_offset=ledger_offset))
