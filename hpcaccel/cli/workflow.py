"""``submit`` of a file with several jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hpcaccel.cli.output import note, print_json
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec

__all__ = ["refuse_for_several", "submit_several"]


def submit_several(
    file: Path,
    overrides: Sequence[str],
    *,
    cluster: str | None,
    runs_dir: Path | None,
    after: Sequence[str],
    dry_run: bool,
    facts: bool,
    json: bool,
    key: str | None,
    refused: Sequence[str],
) -> bool:
    """Submit the jobs of ``file``; False, and nothing done, where it holds one job.

    Args:
        refused: options that were given and are for one job alone.
    """
    from hpcaccel.spec.workflow import read_jobs

    jobs = read_jobs(file, overrides=overrides)
    if jobs is None:
        return False
    refuse_for_several(file, jobs, refused)
    from hpcaccel.submission.workflow import prepare_jobs, submit_jobs

    if dry_run:
        prepared = prepare_jobs(jobs, cluster=cluster, runs_dir=runs_dir, after=after, facts=facts)
        for sentence in dict.fromkeys(sentence for one in prepared for sentence in one.advice):
            note(f"note: {sentence}")
        scripts = [{"name": one.name, "path": str(one.run.path), "script": one.script} for one in prepared]
        _tell(jobs, scripts, json=json, what=f"can be submitted to {prepared[0].cluster}; nothing was (--dry-run)")
        return True
    runs = submit_jobs(jobs, cluster=cluster, runs_dir=runs_dir, after=after, facts=facts, key=key)
    made = [{"name": run.name, "run_id": run.run_id, "job_id": run.job_id, "path": str(run.path)} for run in runs]
    _tell(jobs, made, json=json, what="submitted")
    return True


def refuse_for_several(file: Path, jobs: Sequence[JobSpec], options: Sequence[str]) -> None:
    """Raises UserError for options that were given and are for one job alone."""
    if options:
        raise UserError(f"{', '.join(options)} is for one job, and {file} holds {len(jobs)}")


def _tell(jobs: Sequence[JobSpec], made: Sequence[dict[str, str]], *, json: bool, what: str) -> None:
    if json:
        print_json({"jobs": list(made)})
        return
    typer.echo(f"{len(jobs)} jobs {what}")
    for job, one in zip(jobs, made, strict=True):
        waits = f", after {', '.join(job.after)}" if job.after else ""
        typer.echo(f"  {one['name']}: {one.get('run_id') or one['path']}{waits}")
