"""What ``submit --wait`` and ``wait`` share: a run is shown until it ends, and its result becomes the exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hpcaccel.cli.output import note, print_json

if TYPE_CHECKING:
    from hpcaccel.core.run_dir import RunDir

__all__ = ["follow_to_the_end"]

EXIT_INTERRUPTED = 130


def follow_to_the_end(run: RunDir, *, json: bool) -> None:
    """Show ``run`` until nothing follows by itself, say its last words, and leave with its exit code.

    Raises:
        typer.Exit: with 0 done, 1 failed, 85 paused, 130 cancelled (or Ctrl-C here, which leaves the run alone).
    """
    from hpcaccel.view.progress import display, follow
    from hpcaccel.view.run_overview import overview
    from hpcaccel.view.summary import summary
    from hpcaccel.view.watch import Asking, Watcher

    try:
        with display() as shown:
            last = follow(Watcher(run, Asking.about(run)), shown)
    except KeyboardInterrupt:
        note(f"\nthe run goes on. Follow it again: hpcaccel wait {run.run_id}; end it: hpcaccel cancel {run.run_id}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    ended = overview(run, last.status)
    if json:
        print_json(ended.to_json())
    else:
        typer.echo(summary(ended))
    raise typer.Exit(last.status.exit_code)
