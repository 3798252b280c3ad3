"""``hpcaccel.submit``, ``hpcaccel.map`` and the jobs of one file: check, make the run directory, submit, register."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import open_requests
from hpcaccel.errors import HpcaccelError, SlurmCommandError, SlurmUnreachable, UserError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec import JobSpec
from hpcaccel.submission.calls import ItemCall
from hpcaccel.submission.entrypoint.script_lint import advice_on_job
from hpcaccel.submission.jobs.backend import SlurmBackend
from hpcaccel.submission.runs.control import request_cancel
from hpcaccel.submission.runs.run_handle import Run, RunArray, open_run
from hpcaccel.submission.submit.after_runs import backend_waiting
from hpcaccel.submission.submit.build import build, new_run
from hpcaccel.submission.submit.comparison import command_key, command_of
from hpcaccel.submission.submit.idempotent import Always, Once, note_earlier_run, submit_once
from hpcaccel.submission.submit.prepare import PreparedSubmission, prepare

__all__ = [
    "advice_afterwards",
    "is_half_submitted",
    "key_of",
    "map",
    "prepare_jobs",
    "submit",
    "submit_jobs",
    "submit_prepared",
]


def submit(
    target: str | os.PathLike[str] | JobSpec | Callable[..., Any],
    *args: Any,
    spec: str | os.PathLike[str] | JobSpec | Mapping[str, Any] | None = None,
    cluster: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    grid: Sequence[str] | None = None,
    name: str | None = None,
    from_run: str | os.PathLike[str] | None = None,
    after: Sequence[str] = (),
    **kwargs: Any,
) -> Run | RunArray:
    """Submit a spec file, a ``JobSpec``, or a Python function as a job.

    If anything fails, no run directory and no job are left behind, unless Slurm may have accepted the job without a
    reply: the run is then kept, and the same call continues with that job or submits a new one.

    Args:
        target: the path of a spec file, a spec, or a function that every rank calls with ``args`` and ``kwargs``. A
            function's arguments must be picklable, and its module importable on the nodes if not a script or notebook.
        spec: for a function: resources and environment, as a path, a spec or a mapping. An entrypoint in it is ignored.
        cluster: a profile, ``local`` or ``slurm``. Default: the default profile, else Slurm.
        runs_dir: parent of the run directories. Default: ``HPCACCEL_RUNS_DIR``, else the profile's, else ``./runs``.
        overrides: ``key.sub=value``, as on the command line.
        grid: ``key=a,b,c`` axes. The result is then an array with one task for each combination.
        name: replaces the spec's name.
        from_run: the checkpoint of the first attempt: ``RUN``, ``RUN@step`` or a path. It is pinned if you may do so.
        after: runs that must end first, in addition to those in the spec: ``NAME``, ``afterany:NAME``.

    Raises:
        SpecError, UserError: the spec or another argument is invalid.
        ClusterError: this machine has no Slurm, or Slurm refused the job.
        RunDirectoryError: the run directory cannot be written.
        RunNotFound, CheckpointError: ``from_run`` is not a valid checkpoint.
        SlurmCommandError: Slurm did not respond.

    Example::

        print(hpcaccel.submit("job.yaml", cluster="local", overrides=["slurm.time=10"]).wait().state)
    """
    prepared = prepare(
        target,
        args,
        kwargs,
        spec=spec,
        cluster=cluster,
        runs_dir=runs_dir,
        overrides=overrides,
        grid=grid,
        name=name,
        from_run=from_run,
        after=after,
    )
    for sentence in prepared.advice:
        warnings.warn(sentence, stacklevel=2)
    run = submit_prepared(prepared)
    for sentence in advice_afterwards(prepared, run):
        warnings.warn(sentence, stacklevel=2)
    return run


def advice_afterwards(prepared: PreparedSubmission, run: Run | RunArray) -> tuple[str, ...]:
    """Warnings about the submitted job."""
    if not isinstance(prepared.backend, SlurmBackend):
        return ()
    job_id = f"{run.job_id}_0" if prepared.is_array else run.job_id
    return advice_on_job(prepared.tasks[0].spec, prepared.backend.slurm, job_id)


def submit_prepared(prepared: PreparedSubmission, *, once: Once | Always | None = None) -> Run | RunArray:
    """Submit the result of :func:`prepare`. Raises the errors of :func:`submit`.

    Args:
        once: the key of the submission. If None, a key is made from the contents, and if a process that submitted the
            same contents was killed before it finished, the run of that process is returned.
    """
    slurm = prepared.backend.slurm if isinstance(prepared.backend, SlurmBackend) else None

    def reopen(path: Path) -> Run | RunArray:
        run = open_run(path, slurm=slurm)
        assert isinstance(run, Run | RunArray)
        return run

    return submit_once(
        once,
        command=lambda: command_of([prepared]),
        slurm=slurm,
        submit=lambda own: reopen(_submit(prepared, own)),
        reopen=reopen,
    )


def _submit(prepared: PreparedSubmission, once: Once | Always) -> Path:
    indices = list(range(len(prepared.tasks))) if prepared.is_array else None
    made = new_run(
        prepared.run,
        lambda: build(prepared),
        name=prepared.name,
        once=once,
        indices=indices,
        origin=prepared.origin,
        group=prepared.group,
    )
    with made as submission:
        first = backend_waiting(prepared.backend, prepared.tasks[0].spec, prepared.after)
        submission.submit(prepared.backend, first_job_backend=first, text=prepared.script)
    return prepared.run.path


def map(
    function: Callable[..., Any],
    *items: Iterable[Any],
    spec: str | os.PathLike[str] | JobSpec | Mapping[str, Any],
    cluster: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
    after: Sequence[str] = (),
) -> RunArray:
    """Call ``function(item)`` for each of ``items``, each in a task of one array with the resources of ``spec``.

    Several iterables are zipped up to the end of the shortest, as in the builtin ``map``. Task ``i`` is the run
    ``array[i]``; ``array.results()`` returns the results in the order of the items.

    Args:
        spec: resources and environment of each task: a path, a spec or a mapping.
        cluster, runs_dir, overrides, name, after: as in :func:`hpcaccel.submit`.

    Raises:
        UserError: there are no items, or one cannot be pickled. Also the errors of :func:`hpcaccel.submit`.

    Example::

        array = hpcaccel.map(math.sqrt, [1, 4, 9], spec={"name": "roots"}, cluster="local")
        print(array.results())  # [1.0, 2.0, 3.0]
    """
    if not (calls := list(zip(*items, strict=False))):
        raise UserError("hpcaccel.map() got no items: pass at least one")
    axis = "args.item=" + ",".join(str(number) for number in range(len(calls)))
    array = submit(
        ItemCall(function, calls),
        spec=spec,
        cluster=cluster,
        runs_dir=runs_dir,
        overrides=overrides,
        grid=[axis],
        name=name,
        after=after,
    )
    assert isinstance(array, RunArray)
    return array


def prepare_jobs(
    jobs: Sequence[JobSpec],
    *,
    cluster: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    after: Sequence[str] = (),
    slurm: Slurm | None = None,
    facts: bool = True,
) -> list[PreparedSubmission]:
    """Check all jobs of a file (the result of ``read_jobs``) before the first is submitted.

    Args:
        after: runs that must end first. They apply to the jobs that depend on no other job of the file.

    Raises:
        HpcaccelError: a check failed.
    """
    planned: dict[str, RunDir] = {}
    found = []
    options = {"cluster": cluster, "runs_dir": runs_dir, "slurm": slurm, "facts": facts}
    for job in jobs:
        found.append(_prepare(job, planned, after=after, **options))
        planned[job.name] = found[-1].run
    return found


def _prepare(job: JobSpec, planned: dict[str, RunDir], *, after: Sequence[str], **options: Any) -> PreparedSubmission:
    first = not any(text.partition(":")[2] in planned for text in job.after)
    return prepare(job, after=after if first else (), planned=planned, **options)


def submit_jobs(
    jobs: Sequence[JobSpec],
    *,
    cluster: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    after: Sequence[str] = (),
    slurm: Slurm | None = None,
    facts: bool = True,
    key: str | None = None,
) -> list[Run]:
    """Submit all jobs in order. If one is refused, those before it are cancelled.

    If Slurm stops responding, the submitted jobs are kept, and the same call submits the remaining ones.

    Args:
        key: see :mod:`hpcaccel.submission.submit.idempotent`; each job is submitted under ``key_of(key, number)``.

    Raises:
        HpcaccelError: one of the errors of :func:`hpcaccel.submit`.
    """
    options: dict[str, Any] = {"cluster": cluster, "runs_dir": runs_dir, "slurm": slurm, "facts": facts}
    prepared = prepare_jobs(jobs, after=after, **options)
    if key is not None:
        return _submit_all(jobs, prepared, after=after, key=key, own_key=False, **options)
    # One key for all jobs: a command that is killed between two of them has submitted only some.
    with command_key(command_of(prepared)) as pending:
        runs = _submit_all(jobs, prepared, after=after, key=pending.key, own_key=True, **options)
    for number in range(len(jobs)):
        with Once(f"{pending.key}-{number}") as once:
            once.forget()
    return runs


def _submit_all(
    jobs: Sequence[JobSpec],
    prepared: Sequence[PreparedSubmission],
    *,
    after: Sequence[str],
    key: str,
    own_key: bool,
    **options: Any,
) -> list[Run]:
    planned: dict[str, RunDir] = {}
    runs: list[Run] = []
    try:
        for number, job in enumerate(jobs):
            with Once(f"{key}-{number}", slurm=options["slurm"], retry_failed=own_key) as once:
                if (earlier := once.earlier()) is not None:
                    if own_key:
                        note_earlier_run(earlier.name)
                    run = open_run(earlier, slurm=options["slurm"])
                else:
                    own = prepared[number]
                    if planned:  # its dependency may be the run of an earlier try
                        own = _prepare(job, planned, after=after, **options)
                    run = submit_prepared(own, once=once)
            assert isinstance(run, Run)
            runs.append(run)
            planned[job.name] = run.dir
    except HpcaccelError as error:
        if isinstance(error, SlurmUnreachable) and runs:
            raise _half_submitted(error, runs, of=len(jobs)) from None
        if isinstance(error, SlurmCommandError):
            raise  # it is unknown which jobs Slurm has accepted: repeating the command continues
        for run in reversed(runs):
            try:
                request_cancel(run.dir, slurm=options["slurm"])
            except HpcaccelError as problem:
                warnings.warn(f"run {run.run_id} was not cancelled and may be running: {problem}", stacklevel=2)
        raise
    return runs


def _half_submitted(error: SlurmCommandError, runs: Sequence[Run], *, of: int) -> SlurmCommandError:
    """The error if only some jobs were submitted. They are kept, and repeating the command submits the others."""
    message = (
        f"{error.stderr.strip() or 'no message'}\nonly {len(runs)} of {of} jobs were submitted "
        f"({', '.join(run.run_id for run in runs)}). When Slurm responds again, repeat the command to submit the others"
    )
    return SlurmCommandError(error.command, error.returncode, message)


def is_half_submitted(runs: Sequence[RunDir], *, of: int) -> bool:
    """Whether ``runs`` are only some of a file's ``of`` jobs, and repeating the command submits the others."""
    requests = [request for run in runs for _, request in open_requests(run, of_users=True)]
    return 0 < len(runs) < of and not any(request.then == "cancel" for request in requests)


def key_of(key: str | None, number: int) -> str | None:
    """The key of job ``number`` of a file with several jobs."""
    return None if key is None else f"{key}-{number}"
