"""``status``, ``list``, ``wait``, ``explain``, ``plot``: the state of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcaccel.cli.follow import follow_to_the_end, watch_status
from hpcaccel.cli.options import Cluster, Json, RunName
from hpcaccel.cli.output import note, print_json
from hpcaccel.cli.remote.remote_commands import fetch_file_there
from hpcaccel.cli.remote.target_cluster import cluster_of_run
from hpcaccel.cli.run_names import as_sweep, find, one_run
from hpcaccel.cli.sweep_messages import follow_sweep, note_outdated, show_sweep
from hpcaccel.errors import UserError

if TYPE_CHECKING:
    from hpcaccel.submission.runs.explain import Explanation
    from hpcaccel.submission.runs.run_handle import AnyRun

__all__ = ["explain", "list_", "plot", "status", "wait"]

PICTURES = (".png", ".svg", ".pdf")


def status(
    run: RunName,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until the run ends.")] = False,
    json: Json = False,
) -> None:
    """Show the status of a run: state, attempts, step, losses."""
    if watch and json:
        raise UserError("--watch cannot be combined with --json")
    found = find(run)
    if watch:
        watch_status(found, lambda: _show_status(found, json=False))
    else:
        _show_status(found, json=json)


def _show_status(found: AnyRun, *, json: bool) -> None:
    from hpcaccel.submission.runs.overdue_notices import send_overdue_notices
    from hpcaccel.view.run_overview import overview

    if (sweep := as_sweep(found)) is not None:
        show_sweep(sweep, json=json)
        return
    seen = found.status()
    now = overview(found.dir, seen)
    send_overdue_notices(found.dir, seen)
    if json:
        print_json(now.to_json())
        return
    from hpcaccel.view.run_tables import print_status

    print_status(now)
    note_outdated([now])


def list_(
    everything: Annotated[bool, typer.Option("--all", "-a", help="List all runs, not only the newest.")] = False,
    count: Annotated[int, typer.Option("-n", metavar="N", min=1, help="Number of runs to show.")] = 20,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """List the runs that were submitted from this account, newest first."""
    from hpcaccel.submission.runs.find import known_runs
    from hpcaccel.view.run_overview import listed

    runs = [run.open().dir for run in reversed(known_runs())]
    chosen = runs if everything else runs[:count]
    shown = listed(chosen)
    if json:
        print_json([run.to_json() for run in shown])
        return
    from hpcaccel.view.run_tables import print_runs

    if not shown:
        note("there are no runs yet; start one with hpcaccel submit job.yaml")
        return
    print_runs(shown)
    note_outdated(shown)
    if len(chosen) < len(runs):
        note(f"{len(chosen)} of {len(runs)} runs are shown; --all shows the older ones, too")


def wait(run: RunName, json: Json = False) -> None:
    """Follow a run until it ends; the exit code reports its result.

    0 completed, 1 failed, 85 paused, 130 cancelled. Ctrl-C does not stop the run.
    """
    found = find(run)
    if (sweep := as_sweep(found)) is not None:
        follow_sweep(sweep, json=json)
    follow_to_the_end(found.dir, json=json)


def explain(run: RunName, json: Json = False) -> None:
    """Show why a run is waiting in the queue, when it may start, and which jobs are ahead of it."""
    from hpcaccel.submission.runs.explain import explain_run

    found = explain_run(find(run).dir)
    if json:
        print_json(found.to_json())
        return
    for line in _explanation(found):
        typer.echo(line)


def _explanation(found: Explanation) -> list[str]:
    from hpcaccel.core.formatting import clean, clock_time, duration

    lines = [f"{found.run_id} ({found.name}) is {found.state}{f': {clean(found.detail)}' if found.detail else ''}"]
    for one in found.why:
        tasks = f"{one.tasks} tasks, such as {one.job_id}" if one.tasks > 1 else f"job {one.job_id}"
        lines.append(f"  {clean(one.reason)}: {one.words} ({tasks})")
        lines.append(f"  to do: {one.advice}")
    if found.dependency:
        lines.append(f"  waiting for: {clean(found.dependency)}")
    if found.start_time is not None:
        left = duration(found.start_time - found.asked)
        lines.append(f"  expected start: {clock_time(found.start_time)}, in {left} (Slurm's current estimate)")
    elif found.why and not any(one.waits for one in found.why):
        lines.append("  expected start: never, unless something changes")
    elif found.why:
        lines.append("  expected start: unknown (Slurm estimates it only for the first jobs in the queue)")
    if found.priority is not None and any(one.waits for one in found.why):
        lines += _queue(found)
    if found.problem:
        lines.append(f"  the queue could not be read: {clean(found.problem)}")
    if found.advice:
        lines.append(f"  to do: {clean(found.advice)}")
    return lines


def _queue(found: Explanation) -> list[str]:
    from hpcaccel.core.formatting import clean, duration

    count = len(found.before)
    if not count:
        return ["  ahead of it: no pending job that you can see"]
    jobs = "1 job" if count == 1 else f"{count} jobs"
    lines = [f"  ahead of it: {jobs}, {_nodes(found.nodes_before)} in total"]
    for one in found.shown_before:
        limit = "no time limit" if one.time_limit_seconds is None else f"at most {duration(one.time_limit_seconds)}"
        what = f"job {one.job_id} of {one.user}: {_nodes(one.node_count)}, {limit}"
        lines.append(f"    {clean(what)}")
    if count > len(found.shown_before):
        lines.append(f"    and {count - len(found.shown_before)} more")
    return lines


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def plot(
    run: RunName,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="NAME", help="A metric; repeat it for more. Default: loss.")
    ] = None,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="The file to write: .png, .svg or .pdf.")
    ] = Path("run.png"),
) -> None:
    """Plot the metrics of a run to a file.

    Marks where each attempt resumed, and why the one before it had ended.
    """
    if out.suffix not in PICTURES:
        raise UserError(f"--out {str(out)!r} does not have a supported suffix (allowed: {', '.join(PICTURES)})")
    if (there := cluster_of_run(run)) is not None:
        names = [word for name in metric or () for word in ("--metric", name)]
        fetch_file_there(there[0], ["plot", there[1], *names], out)
    import io

    from hpcaccel.core.durable_files import atomic_write

    out = out.expanduser().absolute()
    if not out.parent.is_dir():
        raise UserError(f"the directory {out.parent} does not exist: create it, or choose another --out")
    picture = io.BytesIO()
    one_run(find(run)).plot(metric or None).savefig(picture, format=out.suffix[1:])
    atomic_write(out, picture.getvalue())
    typer.echo(str(out))
