"""``report``: where the time of a run went."""

from __future__ import annotations

from hpcaccel.cli.options import Json, RunName
from hpcaccel.cli.output import print_json
from hpcaccel.cli.run_lookup import as_sweep, find, one_run

__all__ = ["report"]


def report(run: RunName, json: Json = False) -> None:
    """Show how much of a run's time became training, where the rest went, and how often it should save."""
    from hpcaccel.view.time_report import report as gather

    found = find(run)
    if as_sweep(found) is not None:
        one_run(found)
    told = gather(found.dir, found.status())
    if json:
        print_json(told.to_json())
        return
    from hpcaccel.view.report_table import print_report

    print_report(told)
