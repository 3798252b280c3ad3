"""The report of one run: everything of its overview, its curves, and what is needed to repeat it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.formatting import clock_time, duration, number, percent, precise_duration, rate, step_of
from hpcaccel.core.records import RunRecord
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.jobs.run_state import read_record
from hpcaccel.submission.runs.attempts import LOSS, Attempt
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.submission.runs.watch import describe_end
from hpcaccel.view.goodput import PARTS
from hpcaccel.view.html_report.charts import ChartLine, Mark, line_chart
from hpcaccel.view.html_report.curves import RunCurves
from hpcaccel.view.html_report.page_parts import (
    Fact,
    Page,
    PageSection,
    Strip,
    Table,
    mask_of,
    paired,
    sealed,
    spec_of,
    strip_of,
)
from hpcaccel.view.html_report.rank_sections import rank_section, usage_sections
from hpcaccel.view.html_report.record_sections import (
    LONGEST_TEXT,
    checkpoint_section,
    profile_section,
    provenance_sections,
    text_section,
)
from hpcaccel.view.merged_log import first_traceback
from hpcaccel.view.rank_states import blame_of
from hpcaccel.view.report_table import interval_lines, without_rows
from hpcaccel.view.run_overview import Overview
from hpcaccel.view.time_report import TimeReport, report

__all__ = ["ReportedRun", "run_page"]

_STYLES = {
    "training": "training", "slow": "slow", "stall": "saving", "lost": "lost", "queue": "queued", "hang": "hung",
    "untold": "unknown", "paused": "paused",
}  # fmt: skip
"""Style of a part of the time; the other parts are the start and the end of the processes."""
_TOKENS = ("tokens_per_second", "tokens_per_sec", "tok/s")


@dataclass(frozen=True)
class ReportedRun:
    """A run, with the data that a report shows."""

    run: RunDir
    overview: Overview
    record: RunRecord
    spec: dict[str, Any]
    """The spec, flat; see :func:`spec_of`."""
    curves: RunCurves
    time: TimeReport
    mask: Callable[[str], str]

    @classmethod
    def of(cls, run: RunDir, overview: Overview, status: RunStatus) -> ReportedRun:
        spec = spec_of(read_json(run.spec))
        curves = RunCurves(run, overview.history)
        return cls(run, overview, read_record(run), spec, curves, report(run, status), mask_of(run, spec))


def run_page(source: ReportedRun, *, now: float) -> Page:
    """The page of one run, with secrets masked."""
    one = source.overview
    where = [one.run_id, f"job {one.job_id}" if one.job_id else "", one.cluster or one.backend]
    page = Page(
        title=one.name,
        subtitle=" · ".join([part for part in where if part] + [f"submitted {clock_time(one.created)}"]),
        state=one.state,
        detail=one.detail,
        progress=min(1.0, one.step / one.total_steps) if one.step is not None and one.total_steps else None,
        facts=list(_facts(source)),
        sections=paired(_sections(source)),
        made=clock_time(now),
    )
    return sealed(page, source.mask)


def _facts(source: ReportedRun) -> Iterator[Fact]:
    one, time = source.overview, source.time
    yield Fact("steps", step_of(one.step, one.total_steps), f"{one.steps_lost} lost" if one.steps_lost else "")
    if one.last_loss is not None:
        first = "" if one.first_loss is None else f"from {number(one.first_loss)}"
        yield Fact("loss", number(one.last_loss), first)
    yield Fact("attempts", str(one.attempts))
    if time.total_seconds > 0:
        yield Fact("total time", duration(time.total_seconds), f"{duration(time.held_seconds)} with nodes")
    if time.ettr is not None and time.seconds["training"] > 0:
        yield Fact("effective training", percent(time.ettr), f"{percent(time.goodput)} of the time with nodes")
    if one.steps_per_second is not None:
        yield Fact("pace", f"{number(one.steps_per_second)} steps/s", _tokens(one))
    if one.eta_seconds is not None:
        yield Fact("ready in", duration(one.eta_seconds), "at the present pace")
    if one.time_left_seconds is not None:
        yield Fact("time left in the job", duration(one.time_left_seconds))
    if one.data_wait_share is not None:
        yield Fact("waiting for data", percent(one.data_wait_share), "of a step")
    if one.usage is not None and one.usage.energy_kwh is not None:
        yield Fact("energy of the GPUs", f"{number(one.usage.energy_kwh)} kWh")


def _tokens(one: Overview) -> str:
    return "" if one.tokens_per_second is None else f"{rate(one.tokens_per_second)} tokens/s"


def _sections(source: ReportedRun) -> Iterator[PageSection | None]:
    one = source.overview
    yield _failure(source)
    if one.at_risk is not None:
        yield PageSection(title="Work at risk", lines=[one.at_risk.sentence])
    if one.hints:
        yield PageSection(title="For the next spec", lines=one.hints)
    yield _life(one)
    yield from _charts(source)
    yield _time_parts(source.time)
    yield _without(source.time)
    yield _attempts(one)
    yield rank_section(one)
    yield from usage_sections(one)
    yield checkpoint_section(source.run)
    yield profile_section(source.run)
    yield text_section("Spec", source.run.spec_yaml, folded=False)
    yield text_section("Batch script", source.run.script, folded=True)
    yield from provenance_sections(source.run, source.record)


def _failure(source: ReportedRun) -> PageSection | None:
    one = source.overview
    found = first_traceback(source.run)
    ended_badly = one.state in ("failed", "lost") or bool(one.error_class)
    if not ended_badly and found is None:
        return None
    lines = [f"Error class: {one.error_class}"] if one.error_class else []
    lines += [one.advice] if one.advice else []
    end = one.history[-1].end if one.history else None
    lines += [] if end is None or not ended_badly else [f"Attempt {one.history[-1].number} {describe_end(end)}"]
    title = "What failed" if ended_badly else "The newest failure, from which the run continued"
    note = "" if found is None else blame_of(found[0], one.ranks, one.error_class)
    return PageSection(
        title=title, note=note, alarm=ended_badly, lines=lines, text="" if found is None else found[1][-LONGEST_TEXT:],
        folded=None if ended_badly else True,
    )  # fmt: skip


def _life(one: Overview) -> PageSection | None:
    parts = [
        (
            part.part,
            part.part,
            part.ended - part.started,
            f"{part.part} for {precise_duration(part.ended - part.started)}"
            + (f", attempt {part.attempt}" if part.attempt else "")
            + (f": {part.text}" if part.text else ""),
        )
        for part in one.life
    ]
    if not parts:
        return None
    last = one.life[-1].ended
    strip = strip_of(parts, first=clock_time(one.life[0].started), last=clock_time(last))
    ends = [f"Attempt {past.number} {describe_end(past.end)}" for past in one.history if past.end is not None]
    return None if strip is None else PageSection(title="The life of the run", strip=strip, lines=_shortened(ends))


def _shortened(lines: list[str]) -> list[str]:
    most = 12
    return lines if len(lines) <= most else [f"{len(lines) - most} earlier attempts", *lines[-most:]]


def _charts(source: ReportedRun) -> Iterator[PageSection]:
    names = source.curves.names()
    marks = list(_marks(source.overview.history, source.mask))
    shown = [name for name in (LOSS, *(name for name in names if "loss" in name.lower())) if name in names]
    shown = list(dict.fromkeys(shown)) or names[:1]
    for name in shown[:4]:
        curve, repeated = source.curves.kept(name), source.curves.repeated(name)
        lines = [ChartLine(points=one.points, name="repeated by a later attempt", style="dim") for one in repeated]
        lines.append(ChartLine(points=curve.points, band=curve.band, name=source.mask(name)))
        chart = line_chart(lines, x_title="step", y_title=source.mask(name), marks=marks)
        if chart:
            yield PageSection(title=_title(name), chart=chart, wide=len(shown) == 1 or name == LOSS)
    pace = source.curves.pace()
    tokens = next((name for name in _TOKENS if name in names), None)
    curve, title = (pace, "steps/s") if tokens is None else (source.curves.kept(tokens), "tokens/s")
    wide = len(shown) != 2
    chart = line_chart(
        [ChartLine(points=curve.points, style="c3")], x_title="step", y_title=title, marks=marks, from_zero=True
    )
    if chart:
        yield PageSection(title="Throughput", chart=chart, wide=wide)


def _title(name: str) -> str:
    return name[:1].upper() + name[1:].replace("_", " ")


def _marks(history: list[Attempt], mask: Callable[[str], str]) -> Iterator[Mark]:
    for before, after in pairwise(history):
        if after.resumed_step is not None:
            why = "" if before.end is None else f": attempt {before.number} {describe_end(before.end)}"
            yield Mark(
                x=after.resumed_step, text=mask(f"attempt {after.number} continues from step {after.resumed_step}{why}")
            )


def _time_parts(time: TimeReport) -> PageSection | None:
    parts = [(part, seconds) for part in PARTS if (seconds := time.seconds[part]) > 0]
    strip: Strip | None = strip_of(
        (_STYLES.get(part, "starting"), _part_name(part), seconds, f"{_part_name(part)}: {precise_duration(seconds)}")
        for part, seconds in parts
        if part != "paused"
    )
    if strip is None:
        return None
    counted = time.total_seconds - time.seconds["paused"]
    newest = time.attempts[-8:] if len(time.attempts) > 1 else []
    rows = [
        [
            _part_name(part),
            percent(seconds / counted) if part != "paused" and counted > 0 else "",
            precise_duration(seconds),
            *(precise_duration(own.seconds[part]) if own.seconds[part] else "" for own in newest),
            PARTS[part],
        ]
        for part, seconds in parts
    ]
    columns = ["part", ">share", ">total", *(f">attempt {own.attempt}" for own in newest), "meaning"]
    advice = [] if time.interval is None else [line.strip() for line in interval_lines(time.interval) if line]
    table = Table(columns=columns, rows=rows)
    return PageSection(
        title="Where the time went", strip=Strip(blocks=strip.blocks, legend=()), table=table, lines=advice
    )


def _without(time: TimeReport) -> PageSection | None:
    rows = [list(row) for row in without_rows(time)]
    columns = ["without", ">goodput", ">ETTR", "counted", "not counted"]
    line = f"With them: goodput {percent(time.goodput)}, ETTR {percent(time.ettr)}."
    table = Table(columns=columns, rows=rows)
    return PageSection(title="Without the measures against faults", table=table, lines=[line]) if rows else None


def _part_name(part: str) -> str:
    return {"untold": "unknown", "stall": "blocked by saves", "meeting": "connecting the ranks"}.get(
        part, part
    ).replace("_", " ")


def _attempts(one: Overview) -> PageSection | None:
    rows = []
    for past in one.history:
        start, end = past.start, past.end
        rows.append(
            [
                str(past.number),
                "" if start is None else clock_time(start.time),
                "" if end is None else duration(end.seconds),
                past.origin,
                "" if end is None or end.last_step is None else str(end.last_step),
                "" if start is None else ", ".join(start.nodes),
                "running" if end is None else describe_end(end),
            ]
        )
    columns = [">attempt", "started", ">took", ">from step", ">to step", "nodes", "how it ended"]
    return PageSection(title="Attempts", table=Table(columns=columns, rows=rows)) if rows else None
