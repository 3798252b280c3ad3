"""What ``submit`` does before it submits, when it is asked to: changes since the last run, debugging, Slurm's word."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hpcaccel.cli.cluster_option import chosen_profile
from hpcaccel.cli.output import note
from hpcaccel.errors import ClusterError, UserError

if TYPE_CHECKING:
    from hpcaccel.submission.changes import Changes
    from hpcaccel.submission.prepare import Prepared

__all__ = ["debug_overrides", "refuse_what_slurm_refuses", "show_changes"]


def debug_overrides(file: Path, overrides: Sequence[str], cluster: str | None) -> list[str]:
    """The settings of ``submit --debug``, with the user's own behind them, which win."""
    from hpcaccel.spec import load_spec
    from hpcaccel.spec.site import load_facts
    from hpcaccel.submission.debugging import debug_job

    profile = chosen_profile(cluster)
    spec = load_spec(file, overrides=overrides, profile=profile)
    job = debug_job(spec, None if profile is None or profile.backend == "local" else load_facts(profile.name))
    settings = [*job.overrides, *overrides]
    note(f"note: {job.note(load_spec(file, overrides=settings, profile=profile))}")
    return settings


def refuse_what_slurm_refuses(prepared: Prepared) -> None:
    """Ask ``sbatch --test-only``; raises ClusterError with its words where it would not take the job."""
    from hpcaccel.submission.backend import SlurmBackend
    from hpcaccel.submission.queue_plan import ask_of_script

    if not isinstance(prepared.backend, SlurmBackend):
        raise UserError("--live asks Slurm, and the local backend has none")
    answer = ask_of_script(prepared.script, prepared.backend.slurm)
    if answer.refusal:
        raise ClusterError(answer.refusal)
    if answer.start_time is not None:
        from hpcaccel.view.formatting import clock_time

        note(f"note: Slurm would take it, and expects to start it at {clock_time(answer.start_time)}")


def show_changes(prepared: Prepared, *, json: bool) -> dict[str, Any]:
    """What has changed since the last run of that name: printed for people, returned for programs ({} for a first)."""
    from hpcaccel.submission.changes import changes_since_last

    found = changes_since_last(prepared)
    if not json:
        for line in ["this is the first run of that name"] if found is None else _lines(found):
            typer.echo(line)
    return {} if found is None else found.to_json()


def _lines(found: Changes) -> list[str]:
    from hpcaccel.view.formatting import clean, clock_time

    lines = [f"changed since {found.run_id} ({clock_time(found.created)}):"]
    lines += [f"  {one.key}: {clean(_shown(one.before))} -> {clean(_shown(one.now))}" for one in found.settings]
    for names, what in ((found.added, "new"), (found.removed, "gone"), (found.changed, "changed")):
        lines += [f"  {what}: {clean(name)}" for name in names]
    if found.code != "compared":
        lines.append(f"  {found.code}")
    elif found.nothing:
        lines.append("  nothing")
    return [*lines, *(clean(line) for line in found.diff.splitlines())]


def _shown(value: object) -> str:
    return "(not set)" if value is None else str(value)
