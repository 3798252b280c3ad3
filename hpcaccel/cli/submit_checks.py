"""Options of ``submit`` that act before the submission: ``--debug``, ``--live``, ``--diff``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hpcaccel.cli.output import note
from hpcaccel.cli.rendered_scripts import chosen_profile
from hpcaccel.errors import ClusterError, UserError

if TYPE_CHECKING:
    from hpcaccel.submission.submit.prepare import PreparedSubmission

__all__ = ["debug_overrides", "refuse_what_slurm_refuses", "show_changes"]


def debug_overrides(file: Path, overrides: Sequence[str], cluster: str | None) -> list[str]:
    """The overrides of ``submit --debug``, followed by the user's own overrides, which take precedence."""
    from hpcaccel.spec import load_spec
    from hpcaccel.spec.cluster.cluster_facts import load_facts
    from hpcaccel.submission.clusters.plan import debug_job

    profile = chosen_profile(cluster)
    spec = load_spec(file, overrides=overrides, profile=profile)
    job = debug_job(spec, None if profile is None or profile.backend == "local" else load_facts(profile.name))
    settings = [*job.overrides, *overrides]
    note(f"note: {job.note(load_spec(file, overrides=settings, profile=profile))}")
    return settings


def refuse_what_slurm_refuses(prepared: PreparedSubmission) -> None:
    """Check a job with ``sbatch --test-only``.

    Raises:
        ClusterError: Slurm would reject the job; the message contains Slurm's error.
        UserError: the backend is not Slurm.
    """
    from hpcaccel.submission.clusters.plan import ask_of_script
    from hpcaccel.submission.jobs.backend import SlurmBackend

    if not isinstance(prepared.backend, SlurmBackend):
        raise UserError("--live needs Slurm, which the local backend does not use: choose a cluster with --cluster")
    estimate = ask_of_script(prepared.script, prepared.backend.slurm)
    if estimate.refusal:
        raise ClusterError(estimate.refusal)
    if estimate.start_time is not None:
        from hpcaccel.core.formatting import clock_time

        note(f"note: Slurm would accept the job, and expects to start it at {clock_time(estimate.start_time)}")


def show_changes(prepared: PreparedSubmission, *, json: bool) -> dict[str, Any]:
    """Returns the changes since the last run with this name, for JSON output ({} if this is the first run). Prints the
    changes as text unless ``json`` is true."""
    from hpcaccel.submission.submit.comparison import changes_since_last
    from hpcaccel.view.change_lines import change_lines

    found = changes_since_last(prepared)
    if not json:
        for line in ["this is the first run with this name"] if found is None else change_lines(found):
            typer.echo(line)
    return {} if found is None else found.to_json()
