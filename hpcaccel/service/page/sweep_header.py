"""The top of a sweep's page: its state, actions, numbers and failures."""

from __future__ import annotations

from typing import Any

from dash import html

from hpcaccel.core.formatting import duration, gpu_hours, number
from hpcaccel.service.page import confirm, elements
from hpcaccel.sweeps.sweep_overview import FailureCount
from hpcaccel.view.sweep_view import SweepView

__all__ = ["sweep_head"]

ACTIVE = frozenset({"pending", "requeued", "starting", "running", "stopping"})
COUNTS = ("complete", "running", "pruned", "failed", "waiting")


def sweep_head(sweep: SweepView) -> list[Any]:
    """The elements for the current state of the sweep."""
    actions = ("stop_sweep", "cancel_sweep") if sweep.state in ACTIVE else ("resume_sweep",)
    return [
        html.Header(
            className="sweep-title",
            children=[
                html.Div(
                    [
                        html.H1(sweep.name),
                        elements.badge(sweep.state),
                        html.Span(sweep.run_id, className="faint sweep-id"),
                    ]
                ),
                html.Div([confirm.button(name, sweep.run_id, sweep.name) for name in actions]),
            ],
        ),
        *([html.P(sweep.detail, className="sweep-detail")] if sweep.detail else []),
        *([html.P(sweep.note, className="muted")] if sweep.note and sweep.note != sweep.detail else []),
        _numbers(sweep),
        *[_failure(one) for one in sweep.failures],
    ]


def _numbers(sweep: SweepView) -> html.Dl:
    done = sum(sweep.trials.get(state, 0) for state in ("complete", "pruned", "failed"))
    begun = sum(sweep.trials.values())
    counts = ", ".join(f"{sweep.trials[state]} {state}" for state in COUNTS if sweep.trials.get(state))
    spent = gpu_hours(sweep.gpu_hours)
    workers = ", ".join(f"{count} {state}" for state, count in sweep.workers.items())
    facts = [
        (f"{'Lowest' if sweep.direction == 'min' else 'Highest'} {sweep.metric}",
         "none yet" if sweep.best is None else number(sweep.best.value),
         "" if sweep.best is None else f"trial {sweep.best.number}", None),
        ("Trials", f"{begun}" if sweep.max_trials is None else f"{begun} of {sweep.max_trials}", counts,
         None if not sweep.max_trials else done / sweep.max_trials),
        ("GPU-hours", spent if sweep.budget_gpu_hours is None else f"{spent} of {sweep.budget_gpu_hours:g}", "",
         None if not sweep.budget_gpu_hours else sweep.gpu_hours / sweep.budget_gpu_hours),
        ("Workers", str(sum(sweep.workers.values())), workers, None),
        ("Search", sweep.method, f"pruner {sweep.pruner}", None),
    ]  # fmt: skip
    if sweep.seconds_left is not None and sweep.state in ACTIVE:
        facts.append(("Time left", f"about {duration(sweep.seconds_left)}", "", None))
    return html.Dl(className="sweep-numbers", children=[_number(*fact) for fact in facts])


def _number(title: str, value: str, about: str, share: float | None) -> html.Div:
    track = html.Div(html.Span(style={"width": f"{100 * min(1.0, share or 0):.1f}%"}), className="sweep-track")
    return html.Div([html.Dt(title), html.Dd(value), *([track] if share is not None else []), html.Small(about)])


def _failure(failure: FailureCount) -> html.P:
    text = f"{failure.count} × {failure.error_class}, most recently trial {failure.trial}: {failure.detail}"
    return html.P(text, className="sweep-failure", title=text)
