"""``profile``: a trace of the next steps of a running training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.options import Json, RunName
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.run_names import find, one_run
from hpcaccel.core.formatting import size

if TYPE_CHECKING:
    from hpcaccel.core.profile_requests import RankProfile

__all__ = ["profile"]


def profile(
    run: RunName,
    steps: Annotated[int, typer.Option(metavar="N", help="Number of steps to record, at most 50.")] = 5,
    rank: Annotated[
        list[int] | None, typer.Option(metavar="R", help="A rank that records; repeatable. Default: rank 0.")
    ] = None,
    timeout: Annotated[
        int, typer.Option(metavar="SECONDS", help="How long to wait until a rank begins to record.")
    ] = 600,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Only request the trace. The ranks write it into the run directory.")
    ] = False,
    json: Json = False,
) -> None:
    """Record the next steps of a running training with torch's profiler; the run continues.

    The traces are written into the run directory, for chrome://tracing or ui.perfetto.dev. Programs that call neither
    hpcaccel's loop nor a stop gate cannot be recorded.
    """
    from hpcaccel.core.profile_requests import profiles_folder
    from hpcaccel.submission.runs.profiling import follow_profile, request_profile

    found = one_run(find(run))
    request = request_profile(found.dir, steps=steps, ranks=rank or [0])
    if no_wait:
        folder = profiles_folder(found.dir, request.attempt)
        if json:
            print_json({"run_id": found.run_id, "attempt": request.attempt, "traces": []})
        else:
            typer.echo(f"trace requested for {found.run_id}: its ranks write it to {folder}")
        return
    note(f"{found.run_id}: waiting for the next step")
    seen: dict[int, RankProfile] = {}
    for records in follow_profile(found.dir, request, timeout_seconds=timeout):
        for one in records:
            if seen.get(one.rank) != one and (sentence := _progress(one)):
                note(sentence)
            seen[one.rank] = one
    last = [seen[number] for number in sorted(seen)]
    paths = [str(found.path / one.file) for one in last if one.file is not None]
    if json:
        print_json({"run_id": found.run_id, "attempt": request.attempt, "traces": paths})
    else:
        for path in paths:
            typer.echo(path)
    if len(paths) < len(last):
        raise typer.Exit(1)


def _progress(one: RankProfile) -> str:
    steps = f"steps {one.first_step} to {one.first_step + one.steps - 1}"
    if one.state == "recording":
        return f"rank {one.rank} records {steps}"
    if one.state == "writing":
        return f"rank {one.rank} writes the trace"
    if one.state == "done":
        return f"rank {one.rank}: {steps}, {size(one.bytes)}" + (f" ({one.detail})" if one.detail else "")
    return f"error: rank {one.rank} has no trace: {one.detail}"
