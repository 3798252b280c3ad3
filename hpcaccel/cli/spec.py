"""``schema``, ``validate``, ``render``: spec files, before anything is submitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcaccel.cli.cluster_option import chosen_profile
from hpcaccel.cli.options import Cluster, Json, Overrides, RunsDir, SpecFile
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.remote.dispatch import behind_ssh
from hpcaccel.errors import ClusterError, SpecError

if TYPE_CHECKING:
    from hpcaccel.spec import ClusterProfile, JobSpec
    from hpcaccel.submission.remote.bundle import Handed

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
    from hpcaccel.spec.workflow import read_jobs

    profile, there = chosen_profile(cluster), behind_ssh(cluster)
    try:
        if there is None:
            several = read_jobs(file, overrides=overrides or [])
            told = _checked(_jobs(file, overrides or [], profile, several), profile, live=live)
        else:
            from hpcaccel.cli.remote.spec_commands import asked_there
            from hpcaccel.submission.remote.bundle import pack
            from hpcaccel.submission.remote.local_env import meant_for

            with there, meant_for(there, file):
                several = read_jobs(file, overrides=overrides or [])
                told = _checked(_jobs(file, overrides or [], profile, several), profile, live=False)
                if live:
                    words = ["validate", "--live", "--json"]
                    luggage = pack(there, str(file), overrides or [], is_sweep=False, several=several, to_submit=False)
                    _take_over(told, asked_there(there, words, luggage, facts=False))
    except SpecError as error:
        if not json:
            raise
        print_json({"valid": False, "problems": error.problems, "hints": error.hints})
        raise typer.Exit(error.exit_code) from None
    _tell(file, told, several=several is not None, json=json)


@dataclass
class _Told:
    """What was found of one job."""

    spec: JobSpec
    warnings: list[str]
    age: float | None
    """Of the facts, in seconds."""
    estimate: float | None = None

    def to_json(self) -> dict[str, Any]:
        from hpcaccel.spec import spec_hash

        said = {"warnings": self.warnings, "facts_age_seconds": self.age, "estimated_start": self.estimate}
        return {"hash": spec_hash(self.spec), "spec": self.spec.model_dump(mode="json"), **said}


def _checked(jobs: Sequence[JobSpec], profile: ClusterProfile | None, *, live: bool) -> list[_Told]:
    """Each job of a file; raises SpecError with the mistakes of all."""
    told, problems, hints = list[_Told](), list[str](), list[str]()
    for spec in jobs:
        try:
            told.append(_Told(spec, *_on_site(spec, profile)))
            told[-1].estimate = _asked(spec, profile) if live else None
        except SpecError as error:
            hints += error.hints
            problems += error.problems if len(jobs) == 1 else [f"job {spec.name}: {line}" for line in error.problems]
    if problems:
        raise SpecError(problems, hints=list(dict.fromkeys(hints)))
    return told


def _jobs(
    file: Path, overrides: Sequence[str], profile: ClusterProfile | None, several: Sequence[JobSpec] | None
) -> list[JobSpec]:
    """The job of ``file``, or the ``several`` that were read in it, with the defaults of ``profile``."""
    from hpcaccel.spec import load_spec
    from hpcaccel.spec.workflow import over_profile

    if several is None:
        return [load_spec(file, overrides=overrides, profile=profile)]
    return [over_profile(job, profile) for job in several]


def _take_over(told: Sequence[_Told], answer: Handed) -> None:
    """Slurm's own word, from the other side; raises SpecError where it would not take a job."""
    import json

    try:
        said = json.loads(answer.out)
    except ValueError:
        raise ClusterError(answer.err.decode("utf-8", "replace").strip().removeprefix("error: ")) from None
    if not said["valid"]:
        raise SpecError(said["problems"], hints=said.get("hints", []))
    for one, found in zip(told, said.get("jobs", [said]), strict=True):
        one.estimate = found["estimated_start"]


def _tell(file: Path, told: Sequence[_Told], *, several: bool, json: bool) -> None:
    if json:
        jobs = {"jobs": [{"name": one.spec.name, **one.to_json()} for one in told]}
        print_json({"valid": True, **(jobs if several else told[0].to_json())})
        return
    for one in told:
        job = f"job {one.spec.name}: " if several else ""
        for sentence in one.warnings:
            note(f"note: {job}{sentence}")
    typer.echo(f"{file} is valid: " + (f"{len(told)} jobs" if several else _size(told[0].spec)))
    for one in told:
        if several:
            after = f", after {', '.join(one.spec.after)}" if one.spec.after else ""
            typer.echo(f"  {_size(one.spec)}{after}")
        if one.estimate is not None:
            from hpcaccel.view.formatting import clock_time

            typer.echo(f"Slurm would take {one.spec.name}, and expects to start it at {clock_time(one.estimate)}")


def _on_site(spec: JobSpec, profile: ClusterProfile | None) -> tuple[list[str], float | None]:
    """Warnings of the stored facts and their age in seconds; raises SpecError with their errors."""
    if profile is None or profile.backend == "local":
        return [], None
    from hpcaccel.submission.site.checks import findings_for, way_out

    facts, found = findings_for(spec, profile)
    if facts is None:
        return [], None
    if any(one.is_error for one in found):
        wrong = [str(one) for one in found if one.is_error]
        raise SpecError(wrong, hints=[way_out(facts, can_leave_aside=False)])
    return [str(one) for one in found], facts.age_seconds()


def _asked(spec: JobSpec, profile: ClusterProfile | None) -> float | None:
    """When Slurm would start it; raises SpecError with Slurm's words where it would not take it."""
    from hpcaccel.slurm.commands import Slurm
    from hpcaccel.submission.queue_plan import ask_slurm

    if profile is not None and profile.backend == "local":
        raise SpecError("--live asks Slurm, and the local backend has none: name a cluster with --cluster")
    answer = ask_slurm(spec, profile, Slurm())
    if answer.refusal:
        raise SpecError(answer.refusal)
    return answer.start_time


def _size(spec: JobSpec) -> str:
    """``gpt, 2 nodes × 2 ranks``."""
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
    """Print the batch script that `submit` would submit; nothing is touched. Of a file with several jobs: each one."""
    import sys

    import hpcaccel
    from hpcaccel.core.run_dir import RunDir, default_runs_dir
    from hpcaccel.render import render as render_script
    from hpcaccel.spec import spec_hash
    from hpcaccel.spec.workflow import read_jobs

    if (there := behind_ssh(cluster)) is not None:
        from hpcaccel.cli.remote.spec_commands import asked_there, given_options, shown, to_look_at

        with there:
            words = ["render", *given_options(context, there, but={"cluster", "runs_dir"})]
            raise shown(asked_there(there, words, to_look_at(there, file, overrides or []), runs_dir=runs_dir))
    profile = chosen_profile(cluster)
    base = runs_dir.absolute() if runs_dir is not None else default_runs_dir(profile.runs_dir if profile else None)
    several = read_jobs(file, overrides=overrides or [])
    for spec in _jobs(file, overrides or [], profile, several):
        text = render_script(
            spec,
            run_dir=RunDir(base / spec.name / RUN_ID),
            python=sys.executable,
            profile=profile,
            backend=profile.backend if profile is not None else "slurm",
            header={"spec": spec_hash(spec), "hpcaccel": hpcaccel.__version__},
        )
        if several is not None:
            typer.echo(f"### job {spec.name}")
        typer.echo(text, nl=False)
