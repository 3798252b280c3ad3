"""Follows a run: shows its progress until it ends (``wait``, ``submit --wait``), or its status (``status --watch``)."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, NoReturn, TextIO

import typer

from hpcaccel.cli.output import EXIT_INTERRUPTED, note, print_json

if TYPE_CHECKING:
    from hpcaccel.core.run_dir import RunDir
    from hpcaccel.submission.runs.run_handle import AnyRun

__all__ = ["follow_to_the_end", "watch_status"]

LOOK_SECONDS = 2.0
"""Interval at which ``status --watch`` reads the run directory. Slurm is queried no more often than by ``wait``."""
_CLEAR = "\x1b[H\x1b[2J"
"""Escape sequence that clears the screen but keeps the terminal's scrollback."""


def follow_to_the_end(run: RunDir, *, json: bool) -> NoReturn:
    """Show the progress of ``run`` until it ends or pauses, then print its summary, and exit.

    Raises:
        typer.Exit: always. The exit code is 0 if the run completed or was pruned, 1 if it failed or was lost, 85 if it
            paused, 130 if it was cancelled. After Ctrl-C the exit code is also 130, and the run continues.
    """
    from hpcaccel.submission.runs.overdue_notices import send_overdue_notices
    from hpcaccel.submission.runs.progress_display import display, follow
    from hpcaccel.submission.runs.watch import BackgroundQuery, Watcher
    from hpcaccel.view.run_overview import overview
    from hpcaccel.view.run_tables import summary

    try:
        with display() as shown:
            last = follow(Watcher(run, BackgroundQuery.about(run)), shown)
    except KeyboardInterrupt:
        note(f"\nthe run continues. Follow it again: hpcaccel wait {run.run_id}; end it: hpcaccel cancel {run.run_id}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    ended = overview(run, last.status)
    send_overdue_notices(run, last.status)
    if json:
        print_json(ended.to_json())
    else:
        typer.echo(summary(ended))
    raise typer.Exit(last.status.exit_code)


def watch_status(run: AnyRun, show: Callable[[], None]) -> None:
    """Call ``show`` repeatedly until ``run`` has ended or is paused, and print its output page by page.

    On a terminal the screen is cleared before each page; elsewhere an empty line separates the pages.

    Raises:
        typer.Exit: after Ctrl-C, with exit code 130. The run continues.
    """
    from hpcaccel.view.text_tables import has_a_terminal

    is_first = True
    try:
        while True:
            ended = run.status(patient=not is_first).ended
            page, notes = _shown(show)
            sys.stdout.write(_CLEAR if has_a_terminal() else "" if is_first else "\n")
            sys.stdout.write(page)
            sys.stdout.flush()
            sys.stderr.write(notes)
            sys.stderr.flush()
            if ended:
                return
            is_first = False
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        note("\nthe run continues")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _shown(show: Callable[[], None]) -> tuple[str, str]:
    """Returns what ``show`` writes to stdout and what it writes to stderr. The output is collected so that the old page
    stays on the screen until the next one is complete."""
    page, notes = _Page(sys.stdout), _Page(sys.stderr)
    with redirect_stdout(page), redirect_stderr(notes):
        show()
    return page.getvalue(), notes.getvalue()


class _Page(io.StringIO):
    """Buffer that replaces ``stream``; it counts as a terminal if ``stream`` is one."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._is_terminal = stream.isatty()

    def isatty(self) -> bool:
        return self._is_terminal
