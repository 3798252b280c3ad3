"""The report of a sweep: best value so far, learning curves, importances, the table of trials and the best spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.formatting import clock_time, gpu_hours, number, percent
from hpcaccel.errors import UserError
from hpcaccel.sweeps.sweep_handle import Sweep
from hpcaccel.view.html_report.charts import ChartLine, Mark, bars, line_chart
from hpcaccel.view.html_report.page_parts import Fact, Page, PageSection, Table, mask_of, paired, sealed, spec_of
from hpcaccel.view.sweep_view import SweepView, sweep_view

__all__ = ["sweep_page"]

MOST_ROWS = 200
_RIGHT = ("trial", "step", "seconds", "gpu_seconds", "worker", "attempts")


def sweep_page(sweep: Sweep, *, now: float) -> Page:
    """The page of a sweep, with secrets masked.

    Raises:
        UserError: no trial has a value yet.
    """
    seen = sweep_view(sweep.dir, sweep.worker_status(), wait_for_importances=True, now=now)
    if not seen.curves and seen.best is None:
        raise UserError(f"no trial of sweep {sweep.run_id} has a value yet: there is nothing to report")
    about = ["sweep", seen.run_id, f"{seen.method}, pruner {seen.pruner}", seen.cluster or seen.backend]
    page = Page(
        title=seen.name,
        subtitle=" · ".join([*about, f"submitted {clock_time(seen.created)}"]),
        state=seen.state,
        detail=seen.detail,
        facts=list(_facts(seen)),
        sections=paired(_sections(sweep, seen)),
        made=clock_time(now),
    )
    return sealed(page, mask_of(sweep.dir, spec_of(read_json(sweep.dir.sweep))))


def _facts(seen: SweepView) -> Iterator[Fact]:
    if seen.best is not None:
        for name, value in seen.best.values.items():
            yield Fact(f"best {name}", number(value), f"trial {seen.best.number}")
    total = sum(seen.trials.values())
    yield Fact("trials", str(total), ", ".join(f"{count} {state}" for state, count in seen.trials.items() if count))
    budget = "" if seen.budget_gpu_hours is None else f"of {gpu_hours(seen.budget_gpu_hours)}"
    yield Fact("GPU-hours", gpu_hours(seen.gpu_hours), budget)


def _sections(sweep: Sweep, seen: SweepView) -> Iterator[PageSection | None]:
    yield _best_so_far(seen)
    yield _curves(seen)
    if seen.rungs:
        most = max(rung.entered for rung in seen.rungs) or 1
        rows = [
            (f"step {rung.step}", rung.entered / most, f"{rung.entered} reached, {rung.promoted} went on")
            for rung in seen.rungs
        ]
        yield PageSection(title="Rungs", note="How many trials reached each comparison.", chart=bars(rows), wide=False)
    if seen.importances:
        rows = [(name, share, percent(share)) for name, share in seen.importances.items()]
        note = "Share of the difference between good and other trials."
        yield PageSection(title="Importances", note=note, chart=bars(rows), wide=False)
    if seen.best is not None:
        table = Table(
            columns=["parameter", ">value"], rows=[[name, _text(value)] for name, value in seen.best.params.items()]
        )
        yield PageSection(title=f"Best parameters, trial {seen.best.number}", wide=False, table=table)
    if seen.failures:
        failed = [[one.error_class, str(one.count), str(one.trial), one.detail] for one in seen.failures]
        table = Table(columns=["failure", ">trials", ">newest", "detail"], rows=failed)
        yield PageSection(title="Failed trials", table=table, wide=False)
    yield _trials(seen)
    if seen.best is not None:
        spec = sweep.best().to_yaml().rstrip()
        yield PageSection(title="Best spec", note="Submit it as job.yaml.", text=spec, folded=False)
    yield PageSection(title="Sweep file", text=sweep.dir.spec_yaml.read_text(encoding="utf-8").rstrip(), folded=True)


def _best_so_far(seen: SweepView) -> PageSection | None:
    if not seen.best_so_far:
        return None
    steps = [*seen.best_so_far, (max(seen.gpu_hours, seen.best_so_far[-1][0]), seen.best_so_far[-1][1])]
    marks = [] if seen.budget_gpu_hours is None else [Mark(x=seen.budget_gpu_hours, text="the budget")]
    chart = line_chart(
        [ChartLine(points=steps, steps=True)], x_title="GPU-hours of the sweep",
        y_title=f"{seen.metric} ({seen.direction})",
        marks=marks, reach=[mark.x for mark in marks],
    )  # fmt: skip
    note = "" if seen.budget_gpu_hours is None else "The dashed line is the budget."
    return PageSection(title="Best value so far", chart=chart, note=note)


def _curves(seen: SweepView) -> PageSection | None:
    best = None if seen.best is None else seen.best.number
    order = sorted(seen.curves, key=lambda one: (one.trial == best, one.state == "complete"))
    lines = []
    for one in order:
        style = "c1" if one.trial == best else "c6" if one.state == "complete" else "dim"
        name = {"c1": f"trial {best}, the best", "c6": "complete", "dim": "pruned or not complete"}[style]
        lines.append(ChartLine(points=one.points, name=name, style=style, thick=one.trial == best))
    marks = [Mark(x=rung.step, text=f"rung at step {rung.step}") for rung in seen.rungs]
    chart = line_chart(lines, x_title="step", y_title=seen.metric, marks=marks)
    left = sum(seen.trials.values()) - len(seen.curves)
    note = f"{len(seen.curves)} of {len(seen.curves) + left} trials are drawn." if left > 0 else ""
    return PageSection(title="Learning curves", chart=chart, note=note) if chart else None


def _trials(seen: SweepView) -> PageSection | None:
    if not seen.rows:
        return None
    best = None if seen.best is None else seen.best.number
    order = sorted(seen.rows, key=lambda row: _order(row, seen, best))
    chosen = order[:MOST_ROWS]
    names = [name for name in chosen[0] if any(row[name] is not None for row in chosen)]
    numeric = {name for name in names if all(isinstance(row[name], int | float | None) for row in chosen)}
    columns = [f">{name}" if name in numeric or name in _RIGHT else name for name in names]
    note = f"The best {len(chosen)} of {len(order)} trials." if len(order) > len(chosen) else "Best first."
    cells = [[_text(row[name]) for name in names] for row in chosen]
    marked = 0 if best is not None and chosen[0]["trial"] == best else None
    return PageSection(title="Trials", note=note, table=Table(columns=columns, rows=cells, marked=marked))


def _order(row: dict[str, Any], seen: SweepView, best: int | None) -> tuple[Any, ...]:
    value = row.get(seen.metric)
    known = isinstance(value, int | float) and row["state"] == "complete"
    cost = 0.0 if value is None or not known else value if seen.direction == "min" else -value
    return row["trial"] != best, not known, cost, row["trial"]


def _text(value: Any) -> str:
    return "" if value is None else number(value) if isinstance(value, float) else str(value)
