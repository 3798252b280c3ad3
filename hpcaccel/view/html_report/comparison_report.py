"""The report of several runs: their curves over the same steps, and the fields in which their specs differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpcaccel.core.formatting import clock_time, duration, number, percent, step_of
from hpcaccel.submission.runs.attempts import LOSS
from hpcaccel.view.html_report.charts import ChartLine, line_chart
from hpcaccel.view.html_report.page_parts import Page, PageSection, Table, paired, sealed
from hpcaccel.view.html_report.run_report import ReportedRun

__all__ = ["called", "comparison_page", "differing"]

STYLES = 8
"""Number of colours for lines; later runs get the colours again."""
MOST_CHARTS = 6
UNSET = "–"


def comparison_page(sources: Sequence[ReportedRun], *, title: str, now: float) -> Page:
    """The page of several runs, with secrets masked."""

    def mask(text: str) -> str:
        for source in sources:
            text = source.mask(text)
        return text

    page = Page(
        title=title,
        subtitle=f"{len(sources)} runs: " + ", ".join(source.overview.run_id for source in sources),
        sections=paired(_sections(sources, mask)),
        made=clock_time(now),
    )
    return sealed(page, mask)


def called(sources: Sequence[ReportedRun]) -> list[str]:
    """A unique name for each run: its name, with the run id appended if several runs have this name."""
    names = [source.overview.name for source in sources]
    return [
        name if names.count(name) == 1 else f"{name} {source.overview.run_id}"
        for name, source in zip(names, sources, strict=True)
    ]


def differing(specs: Sequence[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """The fields of flat specs that differ, each with its value in every spec; ``–`` where it is not set."""
    names = dict.fromkeys(name for spec in specs for name in spec)
    rows = [(name, [_value(spec[name]) if name in spec else UNSET for spec in specs]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _sections(sources: Sequence[ReportedRun], mask: Callable[[str], str]) -> Iterator[PageSection | None]:
    names = called(sources)
    yield PageSection(title="Results", table=_results(sources, names))
    logged = list(dict.fromkeys(name for source in sources for name in source.curves.names()))
    losses = [name for name in logged if "loss" in name.lower()]
    shown = list(dict.fromkeys([*([LOSS] if LOSS in logged else []), *losses])) or logged[:1]
    for metric in shown[:MOST_CHARTS]:
        yield _chart(metric, sources, names, mask)
    yield _chart(None, sources, names, mask)
    fields = differing([source.spec for source in sources])
    columns = ["field", *names]
    if fields:
        yield PageSection(
            title="Differences of the specs", table=Table(columns=columns, rows=[[a, *b] for a, b in fields])
        )
    else:
        yield PageSection(title="Differences of the specs", note="None: the specs are equal.")
    software = differing([_software(source) for source in sources])
    if software:
        rows = [[name, *values] for name, values in software]
        yield PageSection(title="Differences of the software", table=Table(columns=columns, rows=rows))


def _results(sources: Sequence[ReportedRun], names: Sequence[str]) -> Table:
    columns = [
        "run", "run id", "state", ">steps", ">lost", ">last loss", ">attempts", ">time", ">with nodes",
        ">effective training", ">energy",
    ]  # fmt: skip
    rows = []
    for name, source in zip(names, sources, strict=True):
        one, time = source.overview, source.time
        energy = None if one.usage is None else one.usage.energy_kwh
        rows.append(
            [
                name,
                one.run_id,
                f"{one.state} ({one.error_class})" if one.error_class else one.state,
                step_of(one.step, one.total_steps),
                str(one.steps_lost),
                "" if one.last_loss is None else number(one.last_loss),
                str(one.attempts),
                duration(time.total_seconds),
                duration(time.held_seconds),
                percent(time.ettr) if time.seconds["training"] > 0 else "",
                "" if energy is None else f"{number(energy)} kWh",
            ]
        )
    kept = [place for place in range(len(columns)) if any(row[place] for row in rows)]
    return Table(columns=[columns[place] for place in kept], rows=[[row[place] for place in kept] for row in rows])


def _chart(
    metric: str | None, sources: Sequence[ReportedRun], names: Sequence[str], mask: Callable[[str], str]
) -> PageSection | None:
    """The curve of ``metric`` of every run, or of the steps per second if it is None."""
    lines = []
    for place, (name, source) in enumerate(zip(names, sources, strict=True)):
        curve = source.curves.pace() if metric is None else source.curves.kept(metric)
        lines.append(ChartLine(points=curve.points, band=curve.band, name=mask(name), style=f"c{place % STYLES + 1}"))
    title = "steps/s" if metric is None else mask(metric)
    chart = line_chart(lines, x_title="step", y_title=title, from_zero=metric is None)
    return PageSection(title="Throughput" if metric is None else title, chart=chart) if chart else None


def _software(source: ReportedRun) -> dict[str, Any]:
    record = source.record
    found: dict[str, Any] = {"git commit": record.git_commit, "uncommitted changes": record.git_dirty}
    found |= {"hpcaccel": record.hpcaccel_version, "Python": record.python}
    found |= {name: version for name, version in record.packages.items() if name != "hpcaccel"}
    return {name: value for name, value in found.items() if value is not None}
