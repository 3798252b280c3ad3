"""A run in a notebook: as HTML, and as a display that is updated in the cell. IPython is not imported."""

from __future__ import annotations

import html
import secrets
from collections import deque
from types import TracebackType
from typing import Any

from hpcaccel.submission.runs.watch import Snapshot, facts, news, state_line

__all__ = ["NotebookDisplay", "run_html"]

MOST_EVENTS = 8
"""Maximum number of events that are shown below the progress bar: the newest ones."""
_SMALL = "font-size: 85%; opacity: 0.75"


def run_html(snapshot: Snapshot, *, lines: list[str] | None = None) -> str:
    """The state of a run as HTML: name, state, a progress bar with the newest values, then ``lines`` in small print.

    Names, messages and values come from users and programs, so all text is escaped.
    """
    status = snapshot.status
    attempt = f" · attempt {snapshot.attempt}" if snapshot.attempt else ""
    parts = [f"<b>{html.escape(status.name)}</b>{attempt} · {html.escape(state_line(snapshot))}"]
    known = " · ".join(html.escape(fact) for fact in facts(snapshot))
    if snapshot.total_steps:
        bar = f'<progress value="{snapshot.step or 0}" max="{snapshot.total_steps}"></progress>'
        known = f"{bar} {known}"
    if known:
        parts.append(known)
    parts += [f'<span style="{_SMALL}">{html.escape(line)}</span>' for line in lines or ()]
    return f'<div style="font-family: monospace; line-height: 1.5">{"<br>".join(parts)}</div>'


class NotebookDisplay:
    """Shows a run in the output of the current cell, and replaces this output when something has changed.

    Args:
        shell: IPython's shell object (``core.notebook.notebook_shell``).
    """

    def __init__(self, shell: Any) -> None:
        self._publisher = shell.display_pub
        self._id = f"hpcaccel-{secrets.token_hex(8)}"
        self._before: Snapshot | None = None
        self._events: deque[str] = deque(maxlen=MOST_EVENTS)
        self._shown = ""

    def __enter__(self) -> NotebookDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None and self._before is not None:
            self._events.append("not followed any longer; the run continues")
            self._publish(self._before)

    def show(self, snapshot: Snapshot) -> None:
        self._events.extend(news(self._before, snapshot))
        self._before = snapshot
        self._publish(snapshot)

    def _publish(self, snapshot: Snapshot) -> None:
        text = run_html(snapshot, lines=list(self._events))
        if text == self._shown:
            return
        plain = "  ".join([f"{snapshot.status.name} · {state_line(snapshot)}", *facts(snapshot)])
        self._publisher.publish(
            data={"text/plain": plain, "text/html": text},
            metadata={},
            transient={"display_id": self._id},
            update=bool(self._shown),
        )
        self._shown = text
