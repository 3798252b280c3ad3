"""``schema``, ``validate``, ``render``: spec files, before anything is submitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.cluster import chosen_profile
from hpcaccel.cli.options import Cluster, Json, Overrides, RunsDir, SpecFile
from hpcaccel.cli.output import note, print_json
from hpcaccel.errors import SpecError

if TYPE_CHECKING:
    from hpcaccel.spec import ClusterProfile, JobSpec

__all__ = ["render", "schema", "validate"]

RUN_ID = "RUN_ID"
"""Stands for the id that submit would choose: the same file gives the same text, so that two can be compared."""


def schema(
    sweep: Annotated[bool, typer.Option("--sweep", help="Of files with a section sweep.")] = False,
) -> None:
    """Print the JSON Schema of spec files, for editors."""
    from hpcaccel.spec import schema as job_schema
    from hpcaccel.spec import sweep_schema

    print_json(sweep_schema() if sweep else job_schema())


def validate(
    file: SpecFile,
    overrides: Overrides = None,
    cluster: Cluster = None,
    live: Annotated[bool, typer.Option("--live", help="Ask Slurm as well (sbatch --test-only).")] = False,
    json: Json = False,
) -> None:
    """Check a spec file; all mistakes are named at once. Where facts of the cluster are stored, against these, too."""
    from hpcaccel.spec import load_spec, spec_hash

    profile = chosen_profile(cluster)
    try:
        spec = load_spec(file, overrides=overrides or [], profile=profile)
        warnings, age = _on_site(spec, profile)
        estimate = _asked(spec, profile) if live else None
    except SpecError as error:
        if not json:
            raise
        print_json({"valid": False, "problems": error.problems})
        raise typer.Exit(error.exit_code) from None
    if json:
        said = {"warnings": warnings, "facts_age_seconds": age, "estimated_start": estimate}
        print_json({"valid": True, "hash": spec_hash(spec), "spec": spec.model_dump(mode="json"), **said})
        return
    for sentence in warnings:
        note(f"note: {sentence}")
    typer.echo(f"{file} is valid: {_size(spec)}")
    if estimate is not None:
        from hpcaccel.view.words import clock_time

        typer.echo(f"Slurm would take it, and expects to start it at {clock_time(estimate)}")


def _on_site(spec: JobSpec, profile: ClusterProfile | None) -> tuple[list[str], float | None]:
    """Warnings of the stored facts and their age in seconds; raises SpecError with their errors."""
    if profile is None or profile.backend == "local":
        return [], None
    from hpcaccel.submission.site_checks import findings_for, way_out

    facts, found = findings_for(spec, profile)
    if facts is None:
        return [], None
    if any(one.is_error for one in found):
        raise SpecError([*(str(one) for one in found if one.is_error), way_out(facts, can_leave_aside=False)])
    return [str(one) for one in found], facts.age_seconds()


def _asked(spec: JobSpec, profile: ClusterProfile | None) -> float | None:
    """When Slurm would start it; raises SpecError with Slurm's words where it would not take it."""
    from hpcaccel.slurm.commands import Slurm
    from hpcaccel.submission.planning import ask_slurm

    if profile is not None and profile.backend == "local":
        raise SpecError("--live asks Slurm, and the local backend has none: name a cluster with --cluster")
    answer = ask_slurm(spec, profile, Slurm())
    if answer.refusal:
        raise SpecError(answer.refusal.splitlines())
    return answer.start_time


def _size(spec: JobSpec) -> str:
    """``gpt, 2 nodes × 2 ranks``."""
    nodes, ranks = spec.slurm.nodes or "1", spec.ranks_per_node
    return f"{spec.name}, {nodes} node{'' if str(nodes) == '1' else 's'} × {ranks} rank{'' if ranks == 1 else 's'}"


def render(file: SpecFile, overrides: Overrides = None, cluster: Cluster = None, runs_dir: RunsDir = None) -> None:
    """Print the batch script that `submit` would submit; nothing is touched."""
    import sys

    import hpcaccel
    from hpcaccel.render import render as render_script
    from hpcaccel.rundir import RunDir, default_runs_dir
    from hpcaccel.spec import load_spec, spec_hash

    profile = chosen_profile(cluster)
    spec = load_spec(file, overrides=overrides or [], profile=profile)
    base = runs_dir.absolute() if runs_dir is not None else default_runs_dir(profile.runs_dir if profile else None)
    text = render_script(
        spec,
        run_dir=RunDir(base / spec.name / RUN_ID),
        python=sys.executable,
        profile=profile,
        backend=profile.backend if profile is not None else "slurm",
        header={"spec": spec_hash(spec), "hpcaccel": hpcaccel.__version__},
    )
    typer.echo(text, nl=False)
