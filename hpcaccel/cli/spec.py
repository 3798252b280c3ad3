"""``schema``, ``validate``, ``render``: checks and views of spec files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcaccel.cli.options import Cluster, Json, Overrides, RunsDir, SpecFile
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.remote.remote_commands import bundle_to_inspect, given_options, inspect_there, print_and_exit
from hpcaccel.cli.remote.target_cluster import behind_ssh
from hpcaccel.cli.rendered_scripts import chosen_profile, jobs_of, rendered_scripts
from hpcaccel.errors import ClusterError, SpecError

if TYPE_CHECKING:
    from hpcaccel.spec import ClusterProfile, JobSpec
    from hpcaccel.submission.remote.delivery import BundleReceipt

__all__ = ["render", "schema", "validate"]


def schema(
    sweep: Annotated[bool, typer.Option("--sweep", help="Print the schema of files with a sweep section.")] = False,
) -> None:
    """Print the JSON Schema of spec files, for editors."""
    from hpcaccel.spec import schema as job_schema
    from hpcaccel.spec import sweep_schema

    print_json(sweep_schema() if sweep else job_schema())


def validate(
    file: SpecFile,
    overrides: Overrides = None,
    cluster: Cluster = None,
    live: Annotated[bool, typer.Option("--live", help="Also check with Slurm (sbatch --test-only).")] = False,
    json: Json = False,
) -> None:
    """Check a spec file, also against the stored facts about the cluster."""
    from hpcaccel.spec.loading.workflow import read_jobs

    profile, there = chosen_profile(cluster), behind_ssh(cluster)
    try:
        if there is None:
            several = read_jobs(file, overrides=overrides or [])
            checked = _check(jobs_of(file, overrides or [], profile, several), profile, live=live)
        else:
            from hpcaccel.submission.remote.bundle import expanded_on, pack

            with there, expanded_on(there, file):
                several = read_jobs(file, overrides=overrides or [])
                checked = _check(jobs_of(file, overrides or [], profile, several), profile, live=False)
                if live:
                    words = ["validate", "--live", "--json"]
                    bundle = pack(there, str(file), overrides or [], is_sweep=False, several=several, to_submit=False)
                    _add_estimates(checked, inspect_there(there, words, bundle, facts=False))
    except SpecError as error:
        if not json:
            raise
        print_json({"valid": False, "problems": error.problems, "hints": error.hints})
        raise typer.Exit(error.exit_code) from None
    _print_checked(file, checked, several=several is not None, json=json)


@dataclass
class _CheckedJob:
    """A job that passed all checks."""

    spec: JobSpec
    warnings: list[str]
    age: float | None
    """Age of the stored facts in seconds; None if there are no facts."""
    estimate: float | None = None
    """Expected start, in seconds since the epoch; None if unknown."""

    def to_json(self) -> dict[str, Any]:
        from hpcaccel.spec import spec_hash

        return {
            "hash": spec_hash(self.spec),
            "spec": self.spec.model_dump(mode="json"),
            "warnings": self.warnings,
            "facts_age_seconds": self.age,
            "estimated_start": self.estimate,
        }


def _check(jobs: Sequence[JobSpec], profile: ClusterProfile | None, *, live: bool) -> list[_CheckedJob]:
    """Check each job of a file; raises SpecError with the mistakes of all jobs."""
    checked, problems, hints = list[_CheckedJob](), list[str](), list[str]()
    for spec in jobs:
        try:
            checked.append(_CheckedJob(spec, *_on_site(spec, profile)))
            checked[-1].estimate = _expected_start(spec, profile) if live else None
        except SpecError as error:
            hints += error.hints
            problems += error.problems if len(jobs) == 1 else [f"job {spec.name}: {line}" for line in error.problems]
    if problems:
        raise SpecError(problems, hints=list(dict.fromkeys(hints)))
    return checked


def _add_estimates(checked: Sequence[_CheckedJob], receipt: BundleReceipt) -> None:
    """Set the expected start of each job from the output of ``validate --live`` on the cluster.

    Raises:
        SpecError: Slurm would reject a job.
        ClusterError: the command failed on the cluster for another reason.
    """
    import json

    try:
        document = json.loads(receipt.out)
    except ValueError:
        raise ClusterError(receipt.err.decode("utf-8", "replace").strip().removeprefix("error: ")) from None
    if not document["valid"]:
        raise SpecError(document["problems"], hints=document.get("hints", []))
    for one, found in zip(checked, document.get("jobs", [document]), strict=True):
        one.estimate = found["estimated_start"]


def _print_checked(file: Path, checked: Sequence[_CheckedJob], *, several: bool, json: bool) -> None:
    if json:
        jobs = {"jobs": [{"name": one.spec.name, **one.to_json()} for one in checked]}
        print_json({"valid": True, **(jobs if several else checked[0].to_json())})
        return
    for one in checked:
        job = f"job {one.spec.name}: " if several else ""
        for sentence in one.warnings:
            note(f"note: {job}{sentence}")
    typer.echo(f"{file} is valid: " + (f"{len(checked)} jobs" if several else _size(checked[0].spec)))
    for one in checked:
        if several:
            after = f", after {', '.join(one.spec.after)}" if one.spec.after else ""
            typer.echo(f"  {_size(one.spec)}{after}")
        if one.estimate is not None:
            from hpcaccel.core.formatting import clock_time

            typer.echo(f"Slurm would accept {one.spec.name}, and expects to start it at {clock_time(one.estimate)}")


def _on_site(spec: JobSpec, profile: ClusterProfile | None) -> tuple[list[str], float | None]:
    """Compare a job with the stored facts. Returns the warnings, and the age of the facts in seconds (None if there are
    no facts). Raises SpecError if the job contradicts the facts."""
    if profile is None or profile.backend == "local":
        return [], None
    from hpcaccel.submission.clusters.checks import findings_for, way_out

    facts, found = findings_for(spec, profile)
    if facts is None:
        return [], None
    if any(one.is_error for one in found):
        wrong = [str(one) for one in found if one.is_error]
        raise SpecError(wrong, hints=[way_out(facts, can_leave_aside=False)])
    return [str(one) for one in found], facts.age_seconds()


def _expected_start(spec: JobSpec, profile: ClusterProfile | None) -> float | None:
    """Estimated start of a job, in seconds since the epoch; None if Slurm gives no time.

    Raises:
        SpecError: Slurm would reject the job, or the backend is local.
    """
    from hpcaccel.slurm.commands import Slurm
    from hpcaccel.submission.clusters.plan import query_slurm

    if profile is not None and profile.backend == "local":
        raise SpecError("--live needs Slurm, which the local backend does not use: choose a cluster with --cluster")
    estimate = query_slurm(spec, profile, Slurm())
    if estimate.refusal:
        raise SpecError(estimate.refusal)
    return estimate.start_time


def _size(spec: JobSpec) -> str:
    """Name and size of a job, such as ``gpt, 2 nodes × 2 ranks``."""
    nodes, ranks = spec.slurm.nodes or "1", spec.ranks_per_node
    beside = "".join(f" + {name} on {one.slurm.nodes}" for name, one in spec.components.items())
    return (
        f"{spec.name}, {nodes} node{'' if str(nodes) == '1' else 's'} × {ranks} rank{'' if ranks == 1 else 's'}{beside}"
    )


def render(
    context: typer.Context,
    file: SpecFile,
    overrides: Overrides = None,
    cluster: Cluster = None,
    runs_dir: RunsDir = None,
) -> None:
    """Print the batch script that `submit` would submit (one script per job). Nothing is written."""
    if (there := behind_ssh(cluster)) is not None:
        with there:
            words = ["render", *given_options(context, there, but={"cluster", "runs_dir"})]
            bundle = bundle_to_inspect(there, file, overrides or [])
            print_and_exit(inspect_there(there, words, bundle, runs_dir=runs_dir))
    for text in rendered_scripts(file, overrides or [], chosen_profile(cluster), runs_dir=runs_dir):
        typer.echo(text, nl=False)
