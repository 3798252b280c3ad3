"""Runs in Prometheus' text format: how many are in each state, and the values of the active ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from hpcaccel.service.answers import ERRORS
from hpcaccel.service.run_source import RunSource
from hpcaccel.submission.runs.status import ACTIVE
from hpcaccel.view.run_overview import RunRow

__all__ = ["prometheus_routes", "prometheus_text"]

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGES = {
    "step": ("step", "Newest completed optimizer step."),
    "total_steps": ("total_steps", "Steps of the whole training."),
    "attempts": ("attempts", "Number of attempts."),
    "steps_lost": ("steps_lost", "Steps that were done and lost."),
    "last_loss": ("loss", "Newest loss."),
    "steps_per_second": ("steps_per_second", "Pace of the training."),
    "tokens_per_second": ("tokens_per_second", "Tokens per second, if logged."),
    "eta_seconds": ("eta_seconds", "Estimated time until the last step."),
    "time_left_seconds": ("time_left_seconds", "Time until the job's time limit."),
    "data_wait_share": ("data_wait_ratio", "Share of the time spent waiting for data."),
    "goodput": ("goodput_ratio", "Share of the time with nodes that was spent in training."),
    "at_risk.cost_seconds": ("at_risk_seconds", "What a preemption would cost now."),
}
"""Fields of the overview, each with its metric's name and help."""


def prometheus_routes(source: RunSource) -> APIRouter:
    """The route ``/metrics``."""
    routes = APIRouter(tags=["prometheus"], responses=ERRORS)

    @routes.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> PlainTextResponse:
        """Runs in Prometheus' text format. The token is sent as a bearer token."""
        rows, _ = source.rows(limit=1_000_000, sort="created")
        return PlainTextResponse(prometheus_text(rows), media_type=MEDIA_TYPE)

    return routes


def prometheus_text(rows: Sequence[RunRow]) -> str:
    """The text for Prometheus."""
    return "".join(f"{line}\n" for line in _lines(rows))


def _lines(rows: Sequence[RunRow]) -> Iterator[str]:
    yield "# HELP hpcaccel_runs Number of runs by state."
    yield "# TYPE hpcaccel_runs gauge"
    for state, count in sorted(Counter(row.state for row in rows).items()):
        yield f'hpcaccel_runs{{state="{state}"}} {count}'
    active = [row.to_json() for row in rows if row.state in ACTIVE]
    yield "# HELP hpcaccel_run_info Active runs."
    yield "# TYPE hpcaccel_run_info gauge"
    for run in active:
        yield f"hpcaccel_run_info{{{_labels(run)},state={_quoted(run['state'])},job_id={_quoted(run['job_id'])}}} 1"
    for key, (name, text) in GAUGES.items():
        values = [(run, _value(run, key)) for run in active]
        if any(value is not None for _, value in values):
            yield f"# HELP hpcaccel_run_{name} {text}"
            yield f"# TYPE hpcaccel_run_{name} gauge"
            yield from (
                f"hpcaccel_run_{name}{{{_labels(run)}}} {value!r}" for run, value in values if value is not None
            )


def _value(run: dict[str, Any], key: str) -> float | None:
    value: Any = run
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, int | float) else None


def _labels(run: dict[str, Any]) -> str:
    return ",".join(f"{label}={_quoted(run[label])}" for label in ("run_id", "name", "cluster"))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return f'"{escaped}"'
