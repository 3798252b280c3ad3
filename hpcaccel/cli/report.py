"""``report``: where a run's time went, as text; and reports of runs and sweeps as files to send."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hpcaccel.cli.options import RUN_HELP, Json
from hpcaccel.cli.output import print_json
from hpcaccel.cli.remote.forward import forwarded
from hpcaccel.cli.remote.remote_commands import fetch_file_there
from hpcaccel.cli.remote.target_cluster import cluster_of_arguments
from hpcaccel.cli.run_names import as_sweep, complete_run, find, one_run
from hpcaccel.errors import UserError

__all__ = ["report"]


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help=RUN_HELP, show_default=False, autocompletion=complete_run),
    ],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one HTML file to send to others.", show_default=False),
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Write one picture.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", hidden=True)] = None,
    json: Json = False,
) -> None:
    """Show how much of a run's time was training, what took the rest, and how often to save.

    With --html or --png, write a report of a run, a sweep, or several runs compared. The HTML file needs no network.
    """
    if out is not None:  # from another machine, which names one file
        html, png = (out, png) if out.suffix == ".html" else (html, out)
    if html is None and png is None:
        forwarded(["report"], _print_times, effect="reads")(runs=runs, json=json)
        return
    if json:
        raise UserError("--json cannot be combined with --html or --png")
    from hpcaccel.view.html_report.writing import checked_target, write_report

    html = None if html is None else checked_target(html, "--html" if out is None else "--out", (".html", ".htm"))
    png = None if png is None else checked_target(png, "--png" if out is None else "--out", (".png",))
    if (there := cluster_of_arguments({"runs": runs})) is not None:
        if html is not None and png is not None:
            raise UserError(f"{there[0].name} is behind SSH: give --html and --png in two calls")
        target = html or png
        assert target is not None
        fetch_file_there(there[0], ["report", *there[1].values()], target)
    for path in write_report([find(run) for run in runs], html=html, png=png):
        typer.echo(str(path))


def _print_times(runs: list[str], json: bool) -> None:
    from hpcaccel.view.run_overview import overview
    from hpcaccel.view.time_report import report as time_report

    chosen = [find(run) for run in runs]
    for found in chosen:
        if as_sweep(found) is not None:
            one_run(found)
    states = [(found.dir, found.status()) for found in chosen]
    measured = [(time_report(run, status), overview(run, status)) for run, status in states]
    if json:
        plain = [
            {**times.to_json(), "usage": None if one.usage is None else asdict(one.usage), "hints": one.hints}
            for times, one in measured
        ]
        print_json(plain[0] if len(plain) == 1 else plain)
        return
    from hpcaccel.view.report_table import print_report
    from hpcaccel.view.text_tables import console_for
    from hpcaccel.view.usage_table import print_usage

    for place, (times, one) in enumerate(measured):
        if place:
            typer.echo()
        print_report(times)
        print_usage(one.usage, one.hints, console=console_for(None))
