"""Submitting: check everything, make the run directory, hand the job in, remember it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import register
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec import JobSpec
from hpcaccel.submission.after_runs import backend_waiting
from hpcaccel.submission.backend import SlurmBackend
from hpcaccel.submission.build import build, making
from hpcaccel.submission.command_identity import command_of
from hpcaccel.submission.idempotent import Always, Once, once_asked_for, tell_of_earlier
from hpcaccel.submission.idempotent_resume import Turn
from hpcaccel.submission.prepare import Prepared, prepare
from hpcaccel.submission.recording import record_job
from hpcaccel.submission.run_handle import Run, RunArray, open_run
from hpcaccel.submission.script_lint import advice_on_job
from hpcaccel.submission.submit_script import hand_in

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

    When anything fails, nothing is left behind: no run directory, no job. Only where Slurm does not answer, and may
    have taken the job, the run is kept; the same call, made again, takes that job up, or submits anew.

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
        SlurmCommandError: Slurm did not answer.
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


def submit_prepared(prepared: Prepared, *, once: Once | Always | None = None) -> Run | RunArray:
    """Submit what :func:`prepare` found sound; raises as :func:`submit`.

    Args:
        once: the key that it is submitted under. None: where the same was submitted before by a process that was killed
            before its job was written down, that run is the one.
    """
    slurm = prepared.backend.slurm if isinstance(prepared.backend, SlurmBackend) else None
    if once is not None:
        return _hand_in(prepared, once, slurm)
    with once_asked_for(command_of([prepared]), slurm=slurm) as own:
        if (earlier := own.earlier()) is None:
            return _hand_in(prepared, own, slurm)
    tell_of_earlier(earlier.name)
    return _opened(earlier, slurm)


def _hand_in(prepared: Prepared, once: Once | Always, slurm: Slurm | None) -> Run | RunArray:
    run = prepared.run
    indices = list(range(len(prepared.tasks))) if prepared.is_array else None
    offsets = [0] * len(prepared.tasks)

    def write_down(job_id: str) -> None:
        record_job(run, job_id, indices=indices, offsets=offsets, backend=turn.holding(prepared.backend))
        turn.done()

    once.begin(run)
    with Turn(run) as turn, making(turn, indices=indices, origin=prepared.origin) as is_made:
        build(prepared)
        is_made()
        register(run, name=prepared.name, job_id="")  # it is found from any directory, whatever comes now
        backend = turn.holding(backend_waiting(prepared.backend, prepared.tasks[0].spec, prepared.after))
        hand_in(run, text=prepared.script, backend=backend, indices=indices, after=write_down)
    return _opened(run.path, slurm)


def _opened(path: Path, slurm: Slurm | None) -> Run | RunArray:
    submitted = open_run(path, slurm=slurm)
    assert isinstance(submitted, Run | RunArray)
    return submitted
