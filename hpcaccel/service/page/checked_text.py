"""Checks of the text on the page that submits: problems by line and field, the script, the expected start."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from dash import html

from hpcaccel.core.formatting import duration
from hpcaccel.errors import HpcaccelError
from hpcaccel.service.client import Client, ServiceSpecError
from hpcaccel.service.page.submit_yaml import lines_of, values_of

__all__ = ["CheckedText", "checked", "expected_starts"]


@dataclass(frozen=True, kw_only=True)
class CheckedText:
    """The result of a check."""

    valid: bool
    is_sweep: bool = False
    problems: list[dict[str, Any]] = field(default_factory=list)
    """``path``, ``line``, ``message`` and ``suggestion`` of each mistake."""
    hints: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    script: str | None = None

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of the text with a mistake."""
        return [{"line": one["line"], "message": one["message"]} for one in self.problems if one["line"]]

    def at_field(self, path: str) -> str | None:
        """The first mistake of one field."""
        return next((one["message"] for one in self.problems if one["path"] == path), None)

    def state(self) -> html.Span:
        """The result in a word or two."""
        if self.valid:
            count = len(self.warnings)
            return html.Span(
                f"valid, {count} note{'s' if count > 1 else ''}" if count else "valid", className="is-valid"
            )
        count = len(self.problems)
        return html.Span(f"{count} problem{'s' if count != 1 else ''}", className="is-wrong")

    def shown(self) -> list[html.Div]:
        """The mistakes with their lines and suggestions, then notes."""
        wrong = [
            html.Div(
                className="is-wrong",
                children=[
                    html.Span(f"line {one['line']}" if one["line"] else "", className="submit-line"),
                    html.Span(one["message"]),
                ],
            )
            for one in self.problems
        ]
        notes = [html.Div([html.Span("note", className="submit-line"), html.Span(text)]) for text in
                 (*self.hints, *self.warnings)]  # fmt: skip
        return [*wrong, *notes]


def checked(client: Client, text: str, cluster: str | None, directory: str | None) -> CheckedText:
    """Check a spec, also against the stored facts about its cluster, and render the script of its job."""
    values = values_of(text)
    is_sweep = values is not None and "sweep" in values
    options = {"cluster": cluster, "directory": directory}
    try:
        warnings = client.check(text, **options)["warnings"]
        return CheckedText(valid=True, is_sweep=is_sweep, warnings=warnings, script=client.render(text, **options))
    except ServiceSpecError as error:
        return CheckedText(
            valid=False, is_sweep=is_sweep, problems=_with_lines(error.details, text), hints=list(error.hints)
        )
    except HpcaccelError as error:
        problem = {"path": "", "line": None, "message": str(error), "suggestion": None}
        return CheckedText(valid=False, is_sweep=is_sweep, problems=[problem])


def _with_lines(problems: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The problems, each with the line of its key if the service named only the key."""
    lines = lines_of(text)
    return [{**one, "line": one["line"] or lines.get(one["path"])} for one in problems]


def expected_starts(client: Client, text: str, cluster: str | None, directory: str | None) -> Any:
    """A table of the expected start in each partition for which Slurm was queried."""
    try:
        choices = client.plan(text, cluster=cluster, directory=directory)
    except HpcaccelError as error:
        return html.P(str(error), className="muted")
    if not choices:
        return html.P("Slurm has no partition for this job.", className="muted")
    titles = ("Partition", "Nodes", "Start", "GPU-hours")
    return html.Table(
        [
            html.Thead(html.Tr([html.Th(title) for title in titles])),
            html.Tbody([html.Tr([html.Td(cell) for cell in _cells(one)]) for one in choices]),
        ]
    )


def _cells(choice: dict[str, Any]) -> tuple[str, str, str, str]:
    start, hours = choice["start_time"], choice["gpu_hours"]
    when = choice["problem"] or "unknown: Slurm gave no estimate"
    if start is not None:
        when = f"{datetime.fromtimestamp(start):%a %d %b %H:%M}, in {duration(choice['waits_seconds'])}"
    return choice["partition"] or "default", str(choice["nodes"]), when, "" if hours is None else f"{hours:.3g}"
