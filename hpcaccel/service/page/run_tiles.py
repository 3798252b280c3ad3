"""The numbers of a run, and sentences about what is wrong or could be better."""

from __future__ import annotations

from typing import Any

from dash import html

from hpcaccel.core.formatting import clock_time, duration
from hpcaccel.view.run_overview import Overview

__all__ = ["tiles", "warnings"]


def tiles(run: Overview) -> html.Section:
    """A tile for each number that is known."""
    found = [_progress(run), _pace(run), _left(run), _loss(run), _risk(run), _waits(run), _checkpoint(run)]
    return html.Section([tile for tile in found if tile is not None], className="tiles")


def _tile(title: str, value: str, text: str = "", look: str = "", more: Any = None) -> html.Div:
    parts = [html.Span(title, className="tile-title"), html.Span(value, className="tile-value number"), more]
    return html.Div([*parts, html.Span(text, className="tile-text") if text else None], className=f"tile {look}")


def _progress(run: Overview) -> html.Div | None:
    if run.step is None:
        return None
    if not run.total_steps:
        return _tile("Step", f"{run.step:,}")
    share = min(100.0, 100 * run.step / run.total_steps)
    bar = html.Span(
        html.Span(html.Span(style={"width": f"{share:.2f}%"}), className="track"), className=f"progress s-{run.state}"
    )
    return _tile("Step", f"{run.step:,}", f"of {run.total_steps:,}, {int(share)} %", more=bar)


def _pace(run: Overview) -> html.Div | None:
    if run.steps_per_second is None:
        return None
    tokens = "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f} tokens/s"
    return _tile("Steps/s", f"{run.steps_per_second:.3g}", tokens)


def _left(run: Overview) -> html.Div | None:
    if run.state in ("pending", "requeued"):
        if run.estimated_start is not None:
            return _tile("Starts", clock_time(run.estimated_start), "Slurm's estimate")
        return None if run.queued_since is None else _tile("In the queue since", clock_time(run.queued_since))
    limit = "" if run.time_left_seconds is None else f"{duration(run.time_left_seconds)} to the time limit"
    if run.eta_seconds is not None:
        short = run.time_left_seconds is not None and run.time_left_seconds < run.eta_seconds
        return _tile("To the last step", duration(run.eta_seconds), limit, "is-warned" if short else "")
    return _tile("To the time limit", duration(run.time_left_seconds)) if run.time_left_seconds is not None else None


def _loss(run: Overview) -> html.Div | None:
    if run.last_loss is None:
        return None
    return _tile("Loss", f"{run.last_loss:.4g}", "" if run.first_loss is None else f"{run.first_loss:.4g} at the start")


def _risk(run: Overview) -> html.Div | None:
    risk = run.at_risk
    if risk is None:
        return None
    value = duration(risk.cost_seconds) if risk.cost_seconds is not None else None
    if value is None:
        value = "unknown" if risk.steps_since_commit is None else f"{risk.steps_since_commit:,} steps"
    return _tile("Work at risk", value, risk.sentence, "is-wide")


def _waits(run: Overview) -> html.Div | None:
    if run.data_wait_share is None:
        return None
    high = run.data_wait_share > 0.2
    return _tile(
        "Waits for data", f"{100 * run.data_wait_share:.0f} %", "of the step time", "is-warned" if high else ""
    )


def _checkpoint(run: Overview) -> html.Div | None:
    if run.checkpoint is None or run.at_risk is not None:
        return None
    step = "" if run.checkpoint_step is None else f"step {run.checkpoint_step:,}"
    return _tile("Newest checkpoint", step or run.checkpoint, run.checkpoint if step else "")


def warnings(run: Overview) -> list[html.Div]:
    """The last failure with its advice; what may be outdated; advice for the next spec."""
    found = []
    if run.error_class:
        found.append(_callout("is-bad", run.error_class.replace("_", " "), run.advice))
    if run.note:
        found.append(_callout("is-warned", "The state may be outdated", run.note))
    if run.metrics_warning:
        found.append(_callout("is-warned", "Metrics", run.metrics_warning))
    if run.hints:
        found.append(_callout("is-hint", "For the next spec", html.Ul([html.Li(hint) for hint in run.hints])))
    return found


def _callout(look: str, title: str, text: Any) -> html.Div:
    return html.Div([html.Strong(title), html.Div(text)], className=f"callout {look}")
