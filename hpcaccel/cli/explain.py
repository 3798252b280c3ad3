"""``explain``: why a run waits, in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hpcaccel.cli.options import Json, RunName
from hpcaccel.cli.output import print_json
from hpcaccel.cli.run_lookup import find

if TYPE_CHECKING:
    from hpcaccel.submission.explaining import Explanation

__all__ = ["explain"]


def explain(run: RunName, json: Json = False) -> None:
    """Say why a run waits in the queue, when it may start, what comes before it."""
    from hpcaccel.submission.explaining import explain_run

    found = explain_run(find(run).dir)
    if json:
        print_json(found.to_json())
        return
    for line in _lines(found):
        typer.echo(line)


def _lines(found: Explanation) -> list[str]:
    from hpcaccel.view.formatting import clean, clock_time, duration

    lines = [f"{found.run_id} ({found.name}) is {found.state}{f': {clean(found.detail)}' if found.detail else ''}"]
    for one in found.why:
        tasks = f"{one.tasks} tasks, {one.job_id} for one" if one.tasks > 1 else f"job {one.job_id}"
        lines.append(f"  {clean(one.reason)}: {one.words} ({tasks})")
        lines.append(f"  to do: {one.advice}")
    if found.dependency:
        lines.append(f"  it waits for: {clean(found.dependency)}")
    if found.start_time is not None:
        left = duration(found.start_time - found.asked)
        lines.append(f"  expected to start: {clock_time(found.start_time)}, in {left}, as Slurm sees it now")
    elif found.why and not any(one.waits for one in found.why):
        lines.append("  expected to start: not by itself")
    elif found.why:
        lines.append("  expected to start: Slurm does not say (it looks at the first jobs of the queue only)")
    if found.priority is not None and any(one.waits for one in found.why):
        lines += _queue(found)
    if found.problem:
        lines.append(f"  the queue could not be read: {clean(found.problem)}")
    if found.advice:
        lines.append(f"  to do: {clean(found.advice)}")
    return lines


def _queue(found: Explanation) -> list[str]:
    from hpcaccel.view.formatting import clean, duration

    count = len(found.before)
    if not count:
        return ["  before it: nothing that waits has a higher priority, as far as the site shows it"]
    jobs = "1 job" if count == 1 else f"{count} jobs"
    lines = [f"  before it: {jobs} of a higher priority, {_nodes(found.nodes_before)} together"]
    for one in found.shown_before:
        limit = "no time limit" if one.time_limit_seconds is None else f"at most {duration(one.time_limit_seconds)}"
        what = f"job {one.job_id} of {one.user}: {_nodes(one.node_count)}, {limit}"
        lines.append(f"    {clean(what)}")
    if count > len(found.shown_before):
        lines.append(f"    and {count - len(found.shown_before)} more")
    return lines


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
