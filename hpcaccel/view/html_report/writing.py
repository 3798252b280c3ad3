"""Writes a report to a file: HTML from the template, or one picture."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hpcaccel
from hpcaccel.core.durable_files import atomic_write
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import UserError
from hpcaccel.view.html_report.page_parts import Page

if TYPE_CHECKING:
    from hpcaccel.submission.runs.run_handle import AnyRun
    from hpcaccel.sweeps.sweep_handle import Sweep

__all__ = ["checked_target", "html_of", "write_report"]


def checked_target(out: Path, option: str, suffixes: Sequence[str]) -> Path:
    """The absolute path of ``out``.

    Args:
        option: the option that named it, for messages.
        suffixes: the allowed endings, the usual one first.

    Raises:
        UserError: it has another ending, or its folder does not exist.
    """
    given, out = out, out.expanduser().absolute()
    if out.suffix.lower() not in suffixes:
        allowed = " or ".join(suffixes)
        raise UserError(f"{option} {str(given)!r} does not end in {allowed}: name a file such as report{suffixes[0]}")
    if not out.parent.is_dir():
        raise UserError(f"the directory {out.parent} does not exist: create it, or choose another {option}")
    if out.is_dir():
        raise UserError(
            f"{option} {str(given)!r} is a directory: name a file in it, such as {out / f'report{suffixes[0]}'}"
        )
    return out


def html_of(page: Page) -> str:
    """The page as one HTML file, which loads nothing else."""
    from hpcaccel.render.templates import html_template

    return html_template("report.html.j2").render(page=page, version=hpcaccel.__version__)


def write_report(chosen: Sequence[AnyRun], *, html: Path | None = None, png: Path | None = None) -> list[Path]:
    """Write a report of one run, of one sweep, or of several runs compared (the tasks of an array are runs).

    Args:
        html: the HTML file to write.
        png: the picture to write.

    Returns:
        The files that were written.

    Raises:
        UserError: a sweep is given together with other runs, there is nothing to report yet, or matplotlib, which only
            the picture needs, is not installed.
    """
    from hpcaccel.submission.runs.run_handle import RunArray, SweepRun

    sweeps = [one for one in chosen if isinstance(one, SweepRun)]
    if sweeps and len(chosen) > 1:
        raise UserError(
            f"{sweeps[0].run_id} is a sweep, which cannot be compared with other runs: report it alone, or name its "
            f"trials, such as {sweeps[0].run_id}_0"
        )
    if sweeps:
        from hpcaccel.sweeps.sweep_handle import Sweep

        return _write_sweep(Sweep(sweeps[0].path), html=html, png=png)
    flat = [run for one in chosen for run in (one.runs if isinstance(one, RunArray) else [one])]
    unique = {run.path: run for run in flat}
    title = chosen[0].name if len(chosen) == 1 else "Comparison of runs"
    return _write_runs([run.dir for run in unique.values()], title=title, html=html, png=png)


def _write_runs(runs: Sequence[RunDir], *, title: str, html: Path | None, png: Path | None) -> list[Path]:
    from hpcaccel.submission.runs.status import statuses
    from hpcaccel.view.html_report.comparison_report import comparison_page
    from hpcaccel.view.html_report.picture import need_matplotlib, write_picture
    from hpcaccel.view.html_report.run_report import ReportedRun, run_page
    from hpcaccel.view.run_overview import overview

    if png is not None:
        need_matplotlib()
    sources = [ReportedRun.of(run, overview(run, now), now) for run, now in zip(runs, statuses(runs), strict=True)]
    at = time.time()
    if html is not None:
        page = run_page(sources[0], now=at) if len(sources) == 1 else comparison_page(sources, title=title, now=at)
        atomic_write(html, html_of(page))
    if png is not None:
        write_picture(sources, png)
    return [path for path in (html, png) if path is not None]


def _write_sweep(sweep: Sweep, *, html: Path | None, png: Path | None) -> list[Path]:
    from hpcaccel.view.html_report.sweep_report import sweep_page

    if html is not None:
        atomic_write(html, html_of(sweep_page(sweep, now=time.time())))
    if png is not None:
        from hpcaccel.view.sweep_plot import write_plot

        write_plot(sweep, png)
    return [path for path in (html, png) if path is not None]
