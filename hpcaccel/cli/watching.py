"""``status --watch``: the same page again and again, until the run has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from hpcaccel.cli.output import note

if TYPE_CHECKING:
    from hpcaccel.submission.run import AnyRun

__all__ = ["watch_status"]

LOOK_SECONDS = 2.0
"""The run directory is read so often; Slurm is asked as seldom as by ``wait``."""
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def watch_status(run: AnyRun, show: Callable[[], None]) -> None:
    """Call ``show`` until ``run`` has ended. A terminal is cleared before each time; elsewhere an empty line stands
    between one and the next.

    Raises:
        typer.Exit: with 130, after Ctrl-C; the run goes on.
    """
    from hpcaccel.view.columns import has_a_terminal

    is_first = True
    try:
        while True:
            ended = run.status(patient=not is_first).ended
            if has_a_terminal():
                sys.stdout.write(_CLEAR)
            elif not is_first:
                sys.stdout.write("\n")
            show()
            sys.stdout.flush()
            if ended:
                return
            is_first = False
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        note("\nthe run goes on")
        raise typer.Exit(130) from None
