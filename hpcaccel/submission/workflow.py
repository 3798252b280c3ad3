"""Submitting the jobs of one file, each behind those that it waits for: all of them, or none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import HpcaccelError, SlurmCommandError, SlurmUnreachable
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec import JobSpec
from hpcaccel.submission.command_identity import command_of
from hpcaccel.submission.idempotent import Once, asked_for, tell_of_earlier
from hpcaccel.submission.prepare import Prepared, prepare
from hpcaccel.submission.run_handle import Run, open_run
from hpcaccel.submission.run_state import open_requests
from hpcaccel.submission.stop_requests import request_cancel
from hpcaccel.submission.submit import submit_prepared

__all__ = ["is_half_submitted", "key_of", "prepare_jobs", "submit_jobs"]


def prepare_jobs(
    jobs: Sequence[JobSpec],
    *,
    cluster: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    after: Sequence[str] = (),
    slurm: Slurm | None = None,
    facts: bool = True,
) -> list[Prepared]:
    """Check all jobs before the first is submitted.

    Args:
        jobs: as :func:`hpcaccel.spec.workflow.read_jobs` gives them.
        after: what those have to wait for, too, that wait for no other job of the file.

    Raises:
        SpecError, ClusterError, UserError: with what is wrong.
    """
    planned: dict[str, RunDir] = {}
    found = []
    for job in jobs:
        options = {"cluster": cluster, "runs_dir": runs_dir, "slurm": slurm, "facts": facts}
        found.append(_prepare(job, planned, after=after, **options))
        planned[job.name] = found[-1].run
    return found


def _prepare(job: JobSpec, planned: Mapping[str, RunDir], *, after: Sequence[str], **options: Any) -> Prepared:
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
    """Submit all jobs in their order; when one is refused, those before it are cancelled.

    When Slurm stops answering, they stay, and the same call, made once more, goes on with the others.

    Args:
        key: see :mod:`hpcaccel.submission.idempotent`; each job has its own part of it.

    Raises:
        HpcaccelError: as :func:`hpcaccel.submit`.
    """
    options: dict[str, Any] = {"cluster": cluster, "runs_dir": runs_dir, "slurm": slurm, "facts": facts}
    prepared = prepare_jobs(jobs, after=after, **options)
    if key is not None:
        return _submit_all(jobs, prepared, after=after, key=key, own_key=False, **options)
    # A command that was killed between two jobs has submitted some of them for good: all belong to one key.
    with asked_for(command_of(prepared)) as asked:
        runs = _submit_all(jobs, prepared, after=after, key=asked.key, own_key=True, **options)
    for number in range(len(jobs)):
        with Once(f"{asked.key}-{number}") as once:
            once.forget()
    return runs


def _submit_all(
    jobs: Sequence[JobSpec],
    prepared: Sequence[Prepared],
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
            with Once(f"{key}-{number}", slurm=options["slurm"], only_unless_given_up=own_key) as once:
                if (earlier := once.earlier()) is not None:
                    if own_key:
                        tell_of_earlier(earlier.name)
                    run = open_run(earlier, slurm=options["slurm"])
                else:
                    own = prepared[number]
                    if planned:  # an earlier try may have submitted what it waits for
                        own = _prepare(job, planned, after=after, **options)
                    run = submit_prepared(own, once=once)
            assert isinstance(run, Run)
            runs.append(run)
            planned[job.name] = run.dir
    except HpcaccelError as error:
        if isinstance(error, SlurmUnreachable) and runs:
            raise _half_submitted(error, runs, of=len(jobs)) from None
        if isinstance(error, SlurmCommandError):
            raise  # what Slurm has taken is not known: the same command, given again, goes on
        _take_back(runs, slurm=options["slurm"])
        raise
    return runs


def _half_submitted(error: SlurmCommandError, runs: Sequence[Run], *, of: int) -> SlurmCommandError:
    """A plain error, which leaves the command open: those that Slurm has cannot be taken out now."""
    words = (
        f"{error.stderr.strip() or 'no answer'}\n{len(runs)} of {of} jobs are submitted "
        f"({', '.join(run.run_id for run in runs)}): the same command once more, when Slurm answers, submits the others"
    )
    return SlurmCommandError(error.command, error.returncode, words)


def is_half_submitted(runs: Sequence[RunDir], *, of: int) -> bool:
    """Whether ``runs`` are those of a file with ``of`` jobs that the same command goes on with."""
    return 0 < len(runs) < of and not any(request.then == "cancel" for run in runs for _, request in open_requests(run))


def _take_back(runs: Sequence[Run], *, slurm: Slurm | None) -> None:
    for run in reversed(runs):
        try:
            request_cancel(run.dir, slurm=slurm)
        except HpcaccelError as error:  # why the submit failed is what counts
            warnings.warn(f"{run.run_id} may not be cancelled: {error}", stacklevel=2)


def key_of(key: str | None, number: int) -> str | None:
    """The key of one job of several."""
    return None if key is None else f"{key}-{number}"
