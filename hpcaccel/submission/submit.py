"""Submitting: check everything, make the run directory, hand the job in, remember it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpcaccel.rundir import register
from hpcaccel.spec import JobSpec
from hpcaccel.submission.backend import SlurmBackend
from hpcaccel.submission.build import all_or_nothing, build
from hpcaccel.submission.chain import links_behind
from hpcaccel.submission.checkpoints import held
from hpcaccel.submission.dependencies import backend_waiting, note_dependents
from hpcaccel.submission.facts import read_record, write_record
from hpcaccel.submission.foresight import advice_on_job
from hpcaccel.submission.handin import hand_in
from hpcaccel.submission.prepare import Prepared, prepare
from hpcaccel.submission.run import Run, RunArray, open_run

__all__ = ["advice_afterwards", "submit", "submit_prepared"]


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

    When anything fails, nothing is left behind: no run directory, no job.

    Args:
        target: the path of a spec file, a spec, or a function that every rank calls with ``args`` and ``kwargs``; the
            function's module and arguments must be importable and picklable on the nodes.
        spec: for a function: resources and environment, as a path, a spec or a mapping. An entrypoint in it is passed
            over.
        cluster: a profile, ``local`` or ``slurm``. Default: the default profile, else Slurm.
        runs_dir: where the run directory is made. Default: ``HPCACCEL_RUNS_DIR``, the profile's, or ``./runs``.
        overrides: ``key.sub=value``, as on the command line.
        grid: ``key=a,b,c`` axes. The result is then an array with one task for each combination.
        name: in place of the spec's name.
        from_run: a checkpoint that the first attempt starts from: ``RUN``, ``RUN@step`` or a path. It is pinned, so
            that its own run does not delete it.
        after: runs that must have ended before, in addition to the spec's own: ``NAME``, ``afterany:NAME``.

    Raises:
        SpecError: something in the spec is wrong.
        ClusterError: there is no Slurm here, or it refused the job.
        RunDirectoryError: the run directory cannot be written.
        RunNotFound, CheckpointError: ``from_run`` names no good checkpoint.
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


def advice_afterwards(prepared: Prepared, run: Run | RunArray) -> tuple[str, ...]:
    """What the user should know of the job, now that the cluster has it."""
    if not isinstance(prepared.backend, SlurmBackend):
        return ()
    job_id = f"{run.job_id}_0" if prepared.is_array else run.job_id
    return advice_on_job(prepared.tasks[0].spec, prepared.backend.slurm, job_id)


def submit_prepared(prepared: Prepared) -> Run | RunArray:
    """Submit what :func:`prepare` found sound; raises as :func:`submit`."""
    run = prepared.run
    indices = list(range(len(prepared.tasks))) if prepared.is_array else None

    def record_job(job_id: str) -> None:
        for index in indices or []:
            task = run.task(index)
            write_record(task, replace(read_record(task), job_ids=[f"{job_id}_{index}"]), sync=False)
        with links_behind(run, job_id, backend=prepared.backend) as links:
            write_record(run, replace(read_record(run), job_ids=[job_id], links=links))
        note_dependents(prepared.after, run, job_id)

    backend = backend_waiting(prepared.backend, prepared.tasks[0].spec, prepared.after)
    with held(prepared.origin, run_id=run.run_id), all_or_nothing(run):
        build(prepared)
        job_id = hand_in(run, text=prepared.script, backend=backend, indices=indices, after=record_job)
    register(run, name=prepared.name, job_id=job_id)
    slurm = prepared.backend.slurm if isinstance(prepared.backend, SlurmBackend) else None
    submitted = open_run(run.path, slurm=slurm)
    assert isinstance(submitted, Run | RunArray)
    return submitted
