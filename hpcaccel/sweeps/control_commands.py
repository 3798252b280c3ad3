"""Steering a sweep from outside: going on with it, and how many of its workers may run at a time.

Stopping and cancelling are what they are for an array of runs (``hpcaccel.submission.stop_requests``): each worker's
control folder gets a request, and what waits in the queue is taken out of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hpcaccel.core.run_dir import RunDir, SweepDir, atomic_write, read_json, register, write_json
from hpcaccel.errors import (
    RunBusy,
    RunDirectoryError,
    SlurmCommandError,
    SlurmUnreachable,
    SpecError,
    UserError,
)
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec import SweepSpec, sweep_from_values
from hpcaccel.spec.expand import escape
from hpcaccel.submission.backend import backend_named
from hpcaccel.submission.idempotent_resume import Turn, is_open
from hpcaccel.submission.recovery import perhaps_resumed, recover, take_up
from hpcaccel.submission.run_state import honoured_name, open_requests, read_record
from hpcaccel.submission.secret_values import bring_secrets
from hpcaccel.submission.status import RunStatus, status
from hpcaccel.sweeps.arrays import WorkerArrays
from hpcaccel.sweeps.budget import Account, Budget, in_hours, raise_it
from hpcaccel.sweeps.definition import read_definition, sweep_hash
from hpcaccel.sweeps.journal_file import JournalFile
from hpcaccel.sweeps.retry import continue_stopped, stopped_by_budget
from hpcaccel.sweeps.start_sweep import (
    Source,
    arrays_of,
    hand_in_workers,
    load,
    make_worker,
    resolved_yaml,
    workers_needed,
)
from hpcaccel.sweeps.sweep_overview import Study
from hpcaccel.sweeps.trial_attrs import is_drawn

__all__ = ["CHANGEABLE", "current_arrays", "refuse_spent", "resume", "throttle"]

CHANGEABLE = ("max_trials", "workers", "max_gpu_hours", "keep_checkpoints", "retries")
"""Keys of ``sweep`` that another spec on resume may set anew: what has been tried so far stays comparable."""


def resume(
    sweep: SweepDir, *, changes: Sequence[str] = (), file: Source | None = None, slurm: Slurm | None = None
) -> WorkerArrays:
    """Hand in new workers for a sweep of which none is left; its trials go on where they were.

    Where an earlier resume was killed after it had handed workers in, those are the ones.

    Args:
        changes: ``sweep.max_trials=200`` and the like, see ``CHANGEABLE``.
        file: the sweep's spec once more, with such changes.

    Raises:
        RunBusy: a worker lives, or is going to.
        SpecError: the spec differs in what may not change.
        UserError: all trials are done, or the budget is used up.
        RunDirectoryError: the sweep's directory cannot be written.
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
    """Hand in workers 0 to ``count`` - 1, of which none is left, under ``spec``; all or nothing.

    Raises:
        RunDirectoryError: the sweep's directory cannot be written.
    """
    try:
        return _start_workers(sweep, spec, count=count, slurm=slurm)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write to the sweep's directory {sweep.path}: {error.strerror or error}. It is as it was: see that "
            "it can be written, then say this again"
        ) from error


def _start_workers(sweep: SweepDir, spec: SweepSpec, *, count: int, slurm: Slurm | None) -> WorkerArrays:
    record = read_record(sweep)
    backend_named(record.backend, slurm).check()
    bring_secrets(spec.job.environment.secrets, run_id=sweep.run_id)
    with Turn(sweep, slurm=slurm) as turn:
        if take_up(turn):
            raise RunBusy(f"an earlier start of workers of {sweep.run_id} was cut off, and they are in the queue now")
        arrays = WorkerArrays(turn.holding(backend_named(record.backend, slurm)), range(count))
        places = [sweep, *(sweep.worker(index) for index in sweep.worker_indices())]
        with _requests_put_aside(places), _defined(sweep, spec):
            JournalFile(sweep.journal).append([{"hpcaccel": "resume", "time": time.time()}], sync=True)
            for index in set(range(count)) - set(sweep.worker_indices()):
                make_worker(sweep.worker(index), record, run_id=sweep.worker(index).run_id)
            turn.begin(indices=range(count))
            try:
                hand_in_workers(sweep, arrays, turn=turn)
            except SlurmCommandError as error:
                if _is_undone_by(error):
                    raise
                raise perhaps_resumed(error, sweep) from None
    register(sweep, name=record.name, job_id=arrays.array_ids[0])
    return arrays


def _is_undone_by(error: BaseException) -> bool:
    """Whether a hand-in that failed so has left nothing; a Slurm that did not answer may have taken workers."""
    return not isinstance(error, SlurmCommandError) or isinstance(error, SlurmUnreachable)


def refuse_living(now: RunStatus) -> None:
    """Raises RunBusy where the sweep goes on by itself."""
    if now.state == "stopping":
        raise RunBusy(
            f"sweep {now.run_id} is stopping, its trials save and leave: wait for that with `hpcaccel wait "
            f"{now.run_id}`, then go on"
        )
    if not now.ended:
        living = sum(not worker.ended for worker in now.tasks)
        raise RunBusy(
            f"sweep {now.run_id} is {now.state}, with {living} of its workers running or waiting: it goes on by "
            f"itself. Stop it first with `hpcaccel sweep stop {now.run_id}`"
        )


def throttle(sweep: SweepDir, most: int, *, slurm: Slurm | None = None) -> None:
    """Let at most ``most`` workers run at a time. Those that run already go on until they come back through the queue.

    Raises:
        UserError: the sweep runs on this machine, has ended, or is more arrays than ``most``.
    """
    record = read_record(sweep)
    if record.backend == "local":
        raise UserError(
            f"sweep {sweep.run_id} runs on this machine, where there is no queue: stop it, and go on with fewer "
            f"workers by `hpcaccel sweep resume {sweep.run_id} sweep.workers={most}`"
        )
    slurm = slurm or Slurm()
    now = status(sweep, slurm)
    if now.ended:
        raise UserError(f"sweep {sweep.run_id} is {now.state}: none of its workers is in the queue")
    arrays = current_arrays(sweep)
    if most < len(arrays):
        raise UserError(
            f"the workers of {sweep.run_id} are {len(arrays)} arrays ({', '.join(arrays)}), and each runs one worker "
            f"at least: {most} is too few"
        )
    for array_id, share in _shares({one: len(workers) for one, workers in arrays.items()}, most).items():
        slurm.throttle(array_id, share)


def current_arrays(sweep: SweepDir) -> dict[str, list[int]]:
    """The arrays that the newest workers are tasks of, each with the workers' numbers."""
    newest = ((index, read_record(sweep.worker(index)).job_ids[-1:]) for index in sweep.worker_indices())
    found: dict[str, list[int]] = {}
    for index, job_ids in newest:
        for job_id in job_ids:
            found.setdefault(job_id.partition("_")[0], []).append(index)
    return found


def _shares(sizes: Mapping[str, int], most: int) -> dict[str, int]:
    """How many tasks of each array may run: one at least, and then as many as fit, the first array first."""
    left = most - len(sizes)
    shares = {}
    for array_id, size in sizes.items():
        more = min(left, size - 1)
        shares[array_id], left = 1 + more, left - more
    return shares


# -- the spec, once more ----------------------------------------------------------------------------------------------


def _changed(sweep: SweepDir, old: SweepSpec, changes: Sequence[str], file: Source | None) -> SweepSpec:
    if file is not None:
        name = f"name={old.job.name}"  # it may have been given another one when it was started
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
            f"sweep {sweep.run_id} was started with another spec, and its trials would not be comparable: "
            f"{'; '.join(found)}. What may change is {allowed}. For anything else start a new sweep"
        )
    return new


def _differences(old: SweepSpec, new: SweepSpec) -> Iterator[str]:
    before, after = ({**_flat(one.job.model_dump(mode="json"), ""), **_section(one)} for one in (old, new))
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            yield f"{key} was {before.get(key)!r} and is {after.get(key)!r}"


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
            f"sweep {sweep.run_id} is completed, with all of its {len(trials)} trials: there is nothing to go on with. "
            f"For more of them: `hpcaccel sweep resume {sweep.run_id} sweep.max_trials={2 * len(trials)}`"
        )


def refuse_spent(sweep: SweepDir, spec: SweepSpec) -> None:
    """Raises UserError where the sweep may cost no more under ``spec``: workers would leave as soon as they came."""
    budget = Budget(max_gpu_hours=spec.sweep.max_gpu_hours)
    spent = Account(sweep, ranks=Study(sweep).ranks).read().gpu_seconds()
    if budget.is_used_up(spent):
        raise UserError(
            f"max_gpu_hours of sweep {sweep.run_id} is {budget.max_gpu_hours:g}, and {in_hours(spent)} are used up: "
            f"nothing could start. {raise_it(budget, sweep=sweep.run_id, spent=spent)}"
        )


@contextmanager
def _defined(sweep: SweepDir, spec: SweepSpec) -> Iterator[None]:
    """The sweep's files say ``spec``, and when the block fails what they said before, unless workers may be taken."""
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
        if _is_undone_by(error):
            write_json(sweep.sweep, document)
            atomic_write(sweep.spec_yaml, before)
        raise


@contextmanager
def _requests_put_aside(places: Sequence[RunDir]) -> Iterator[None]:
    """Earlier requests to stop are done with; when the block fails, they stand again, unless workers may be taken."""
    stale = [(place, name) for place in places for name, _ in open_requests(place)]
    for place, name in stale:
        (place.control / name).rename(place.control / honoured_name(name))
    try:
        yield
    except BaseException as error:
        for place, name in stale if _is_undone_by(error) else ():
            (place.control / honoured_name(name)).rename(place.control / name)
        raise
