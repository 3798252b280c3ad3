"""``status --watch``: the same page again and again, until the run has ended."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, TextIO

import typer

from hpcaccel.cli.output import note

if TYPE_CHECKING:
    from hpcaccel.submission.run_handle import AnyRun

__all__ = ["watch_status"]

LOOK_SECONDS = 2.0
"""The run directory is read so often; Slurm is asked as seldom as by ``wait``."""
_CLEAR = "\x1b[H\x1b[2J"
"""What the terminal has scrolled away stays."""


def watch_status(run: AnyRun, show: Callable[[], None]) -> None:
    """Call ``show`` until ``run`` has ended. A terminal is cleared before each time; elsewhere an empty line stands
    between one and the next.

    Raises:
        typer.Exit: with 130, after Ctrl-C; the run goes on.
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
        note("\nthe run goes on")
        raise typer.Exit(130) from None


def _shown(show: Callable[[], None]) -> tuple[str, str]:
    """What ``show`` prints, on stdout and on stderr; so that the last page stands until the next one is there."""
    page, notes = _Page(sys.stdout), _Page(sys.stderr)
    with redirect_stdout(page), redirect_stderr(notes):
        show()
    return page.getvalue(), notes.getvalue()


class _Page(io.StringIO):
    """Kept text, written as for ``stream``."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._is_terminal = stream.isatty()

    def isatty(self) -> bool:
        return self._is_terminal
