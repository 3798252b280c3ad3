"""Control of a sweep: resumes it with new workers, and limits how many of its workers run at a time.

Stop and cancel are in ``hpcaccel.submission.runs.control``: a request is written to the sweep's control folder, which
all workers read, and queued tasks are cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hpcaccel.core.durable_files import atomic_write, read_json, write_json
from hpcaccel.core.registered_runs import register
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import mark_honoured, open_requests, reopen
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import (
    RunBusy,
    RunDirectoryError,
    SpecError,
    UserError,
)
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec import SweepSpec, sweep_from_values
from hpcaccel.spec.loading.expand import escape
from hpcaccel.submission.entrypoint.entry import bring_secrets
from hpcaccel.submission.jobs.backend import backend_named
from hpcaccel.submission.jobs.job_submission import JobSubmission, is_open, may_have_job
from hpcaccel.submission.jobs.recovery import recover, recover_interrupted
from hpcaccel.submission.jobs.run_state import read_record
from hpcaccel.submission.runs.status import RunStatus, status
from hpcaccel.sweeps.budget import Budget, in_hours, raise_it
from hpcaccel.sweeps.compute_account import ComputeAccount
from hpcaccel.sweeps.definition import read_definition, resolved_yaml, sweep_hash
from hpcaccel.sweeps.journal_file import JournalFile
from hpcaccel.sweeps.journal_notes import is_drawn
from hpcaccel.sweeps.retry import continue_stopped, stopped_by_budget
from hpcaccel.sweeps.start_sweep import Source, load, workers_needed
from hpcaccel.sweeps.sweep_overview import Study
from hpcaccel.sweeps.worker_jobs import WorkerArrays, arrays_of, hand_in_workers, make_worker

__all__ = ["CHANGEABLE", "current_arrays", "refuse_spent", "resume", "throttle"]

CHANGEABLE = ("max_trials", "workers", "max_gpu_hours", "keep_checkpoints", "retries")
"""Keys of the section ``sweep`` that may change on resume. Other keys may not, so that all trials stay comparable."""


def resume(
    sweep: SweepDir, *, changes: Sequence[str] = (), file: Source | None = None, slurm: Slurm | None = None
) -> WorkerArrays:
    """Submit new workers for a sweep without active workers; its trials continue from their checkpoints.

    If an earlier resume with the same spec was killed after submitting workers, those workers are returned.

    Args:
        changes: overrides such as ``sweep.max_trials=200``, see ``CHANGEABLE``.
        file: the sweep's whole spec with such changes, as a file, a spec or a mapping.

    Raises:
        RunBusy: a worker is running or queued.
        SpecError: the spec is not valid, or differs in keys that may not change.
        UserError: all trials are finished, the budget is used up, or a secret is not set in this environment.
        RunDirectoryError: the sweep's directory cannot be written.
        ClusterError, SlurmCommandError: Slurm rejected the workers, or did not respond.
    """
    was_cut_off = is_open(sweep)
    if was_cut_off:
        recover(sweep, slurm=slurm)
    now = status(sweep, slurm)
    old = read_definition(sweep).spec
    new = _changed(sweep, old, changes, file)
    if was_cut_off and not now.ended and sweep_hash(new) == sweep_hash(old):
        return arrays_of(sweep, backend_named(read_record(sweep).backend, slurm))
    refuse_living(now)
    _refuse_finished(sweep, new, now)
    refuse_spent(sweep, new)
    continue_stopped(sweep, new)
    return start_workers(sweep, new, count=workers_needed(new), slurm=slurm)


def start_workers(sweep: SweepDir, spec: SweepSpec, *, count: int, slurm: Slurm | None = None) -> WorkerArrays:
    """Submit workers 0 to ``count`` - 1 under ``spec``, or fewer if a limit on the user's jobs does not allow all.

    No other worker may be running or queued.

    Raises:
        RunBusy: an earlier start that was interrupted has workers in the queue.
        UserError: a secret is not set in this environment.
        RunDirectoryError: the sweep's directory cannot be written.
        ClusterError, SlurmCommandError: Slurm rejected the workers, or did not respond.
    """
    try:
        return _start_workers(sweep, spec, count=count, slurm=slurm)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write to the sweep's directory {sweep.path}: {error.strerror or error}. No worker was "
            "started. Free some space or make the directory writable, then repeat the command"
        ) from error


def _start_workers(sweep: SweepDir, spec: SweepSpec, *, count: int, slurm: Slurm | None) -> WorkerArrays:
    record = read_record(sweep)
    backend_named(record.backend, slurm).check()
    bring_secrets(spec.job.environment.secrets, run_id=sweep.run_id)
    with JobSubmission(sweep, slurm=slurm) as submission:
        if recover_interrupted(submission):
            raise RunBusy(
                f"sweep {sweep.run_id} already has workers in the queue, from an earlier start that was interrupted. "
                f"Show them with `hpcaccel sweep status {sweep.run_id}`"
            )
        arrays = WorkerArrays(submission.holding(backend_named(record.backend, slurm)), range(count))
        places = [sweep, *(sweep.worker(index) for index in sweep.worker_indices())]
        with _requests_put_aside(places), _defined(sweep, spec):
            JournalFile(sweep.journal).append([{"hpcaccel": "resume", "time": time.time()}], sync=True)
            for index in set(range(count)) - set(sweep.worker_indices()):
                make_worker(sweep.worker(index), record, run_id=sweep.worker(index).run_id)
            submission.write_intent(indices=range(count))
            hand_in_workers(sweep, arrays, submission=submission, again="Another resume")
    register(sweep, name=record.name, job_id=arrays.array_ids[0])
    return arrays


def refuse_living(now: RunStatus) -> None:
    """Raise RunBusy if a worker is running, queued or stopping."""
    if now.state == "stopping":
        raise RunBusy(
            f"sweep {now.run_id} is stopping, and its trials are being saved: wait until it has ended with `hpcaccel "
            f"wait {now.run_id}`, then repeat the command"
        )
    if not now.ended:
        living = sum(not worker.ended for worker in now.tasks)
        raise RunBusy(
            f"sweep {now.run_id} is {now.state}, with {living} of its workers running or queued: it continues without "
            f"this command. To change it, stop it first with `hpcaccel sweep stop {now.run_id}`"
        )


def throttle(sweep: SweepDir, most: int, *, slurm: Slurm | None = None) -> None:
    """Let at most ``most`` workers run at a time. Workers that are running are not stopped.

    Raises:
        UserError: the sweep runs on the local backend, has ended, or has workers in more than ``most`` job arrays.
        SlurmCommandError: Slurm did not respond.
    """
    record = read_record(sweep)
    if record.backend == "local":
        raise UserError(
            f"sweep {sweep.run_id} runs on this machine, which has no queue. To use fewer workers, stop it, then run "
            f"`hpcaccel sweep resume {sweep.run_id} sweep.workers={most}`"
        )
    slurm = slurm or Slurm()
    now = status(sweep, slurm)
    if now.ended:
        raise UserError(f"sweep {sweep.run_id} is {now.state}: none of its workers is in the queue")
    arrays = current_arrays(sweep)
    if most < len(arrays):
        raise UserError(
            f"limit {most} is too low: the workers of {sweep.run_id} are in {len(arrays)} job arrays "
            f"({', '.join(arrays)}), each of which runs at least one worker. Use {len(arrays)} or more"
        )
    for array_id, share in _shares({one: len(workers) for one, workers in arrays.items()}, most).items():
        slurm.throttle(array_id, share)


def current_arrays(sweep: SweepDir) -> dict[str, list[int]]:
    """Numbers of the workers in each current job array, by array id."""
    newest = ((index, read_record(sweep.worker(index)).job_ids[-1:]) for index in sweep.worker_indices())
    found: dict[str, list[int]] = {}
    for index, job_ids in newest:
        for job_id in job_ids:
            found.setdefault(job_id.partition("_")[0], []).append(index)
    return found


def _shares(sizes: Mapping[str, int], most: int) -> dict[str, int]:
    """How many tasks of each array may run at a time: at least one. The rest of ``most`` goes to the first arrays."""
    left = most - len(sizes)
    shares = {}
    for array_id, size in sizes.items():
        more = min(left, size - 1)
        shares[array_id], left = 1 + more, left - more
    return shares


# -- changes of the spec ----------------------------------------------------------------------------------------------


def _changed(sweep: SweepDir, old: SweepSpec, changes: Sequence[str], file: Source | None) -> SweepSpec:
    if file is not None:
        name = f"name={old.job.name}"  # the name may have been overridden when the sweep was started
        new = load(file, cluster=read_record(sweep).cluster, overrides=[name, *changes])
    elif changes:
        job, section = old.job.model_dump(mode="json"), old.sweep.model_dump(mode="json")
        values = escape({**job, "sweep": section})
        assert isinstance(values, Mapping)
        new = sweep_from_values(values, base=sweep.path, overrides=changes)
    else:
        return old
    found = list(_differences(old, new))
    if found:
        allowed = ", ".join(f"sweep.{key}" for key in CHANGEABLE)
        raise SpecError(
            f"sweep {sweep.run_id} was started with a different spec, so the new trials would not be comparable: "
            f"{'; '.join(found)}. Only {allowed} may change. For other changes, start a new sweep"
        )
    return new


def _differences(old: SweepSpec, new: SweepSpec) -> Iterator[str]:
    before, after = ({**_flat(one.job.model_dump(mode="json"), ""), **_section(one)} for one in (old, new))
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            yield f"{key} was {before.get(key)!r} and is now {after.get(key)!r}"


def _section(spec: SweepSpec) -> dict[str, Any]:
    section = spec.sweep.model_dump(mode="json")
    return _flat({key: value for key, value in section.items() if key not in CHANGEABLE}, "sweep.")


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found


def _refuse_finished(sweep: SweepDir, spec: SweepSpec, now: RunStatus) -> None:
    trials = Study(sweep).read().trials
    drawn, most = sum(is_drawn(trial.user_attrs) for trial in trials), spec.sweep.max_trials
    is_done = most is not None and drawn >= most // spec.sweep.repeat and not stopped_by_budget(trials)
    if now.state == "completed" and is_done and all(trial.is_finished for trial in trials):
        raise UserError(
            f"all trials of sweep {sweep.run_id} ({len(trials)}) have ended: there is nothing to continue. "
            f"For more trials: `hpcaccel sweep resume {sweep.run_id} sweep.max_trials={2 * len(trials)}`"
        )


def refuse_spent(sweep: SweepDir, spec: SweepSpec) -> None:
    """Raise UserError if the budget of ``spec`` is used up: workers would end at once."""
    budget = Budget(max_gpu_hours=spec.sweep.max_gpu_hours)
    spent = ComputeAccount(sweep, ranks=Study(sweep).ranks).read().gpu_seconds()
    if budget.is_used_up(spent):
        raise UserError(
            f"max_gpu_hours of sweep {sweep.run_id} is {budget.max_gpu_hours:g}, and {in_hours(spent)} have been used: "
            f"no more trials can start. {raise_it(budget, sweep=sweep.run_id, spent=spent)}"
        )


@contextmanager
def _defined(sweep: SweepDir, spec: SweepSpec) -> Iterator[None]:
    """Write ``spec`` to the sweep's files; restore them if the block fails, unless workers may have been accepted."""
    document = read_json(sweep.sweep) or {}
    before = sweep.spec_yaml.read_text(encoding="utf-8")
    if document["hash"] == sweep_hash(spec):
        yield
        return
    try:
        section = spec.sweep.model_dump(mode="json")
        write_json(sweep.sweep, {**document, "sweep": section, "hash": sweep_hash(spec)})
        atomic_write(sweep.spec_yaml, resolved_yaml(spec))
        yield
    except BaseException as error:
        if not may_have_job(error):
            write_json(sweep.sweep, document)
            atomic_write(sweep.spec_yaml, before)
        raise


@contextmanager
def _requests_put_aside(places: Sequence[RunDir]) -> Iterator[None]:
    """Mark earlier stop requests as honoured; restore them if the block fails and no worker can have been accepted."""
    stale = [(place, name) for place in places for name, _ in open_requests(place, of_users=True)]
    for place, name in stale:
        mark_honoured(place, name)
    try:
        yield
    except BaseException as error:
        for place, name in stale if not may_have_job(error) else ():
            reopen(place, name)
        raise
