"""Data and actions of ``hpcaccel top``: plain data of runs from ``view``, and actions on them. All calls may block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.submission.runs.find import KnownRuns
from hpcaccel.submission.runs.run_handle import SweepRun, open_run
from hpcaccel.view.merged_log import first_traceback
from hpcaccel.view.run_overview import Overview, RunRow, listed, overview
from hpcaccel.view.sweep_view import SweepView, sweep_view

__all__ = ["ACTIONS", "Action", "Watched", "WatchedRuns"]

Action = Literal["stop", "requeue", "finish", "save", "cancel", "resume"]

ACTIONS: dict[Action, tuple[str, str]] = {
    "stop": ("Stop", "It saves and exits; resume continues it from there."),
    "requeue": ("Requeue", "It saves, exits, and its job is queued again."),
    "finish": ("Finish", "Its training loop ends after this step, and the code after the loop runs."),
    "save": ("Save", "It saves a checkpoint now and continues."),
    "cancel": ("Cancel", "It ends now. Steps since the last checkpoint are lost."),
    "resume": ("Resume", "A new job continues it from its newest checkpoint."),
}
"""The actions: a word for the question and the button, and what follows."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One run or sweep, with its overview."""

    run: Overview | None = None
    sweep: SweepView | None = None
    traceback: tuple[int, str] | None = None


class WatchedRuns:
    """The newest runs of this account.

    Args:
        most: maximum number of runs in the list.
    """

    def __init__(self, most: int = 200) -> None:
        self._most = most
        self._known = KnownRuns()

    def rows(self) -> tuple[list[tuple[RunRow, bool]], int]:
        """The rows of the newest runs, newest first, each with whether it is a sweep; and the number of all runs.

        Slurm is queried through the cache that all processes of the user share, at most once a minute.
        """
        known = self._known.read()
        newest = known[::-1][: self._most]
        rows = listed([one.open().dir for one in newest], patient=True)
        return [(row, one.kind == "sweep") for row, one in zip(rows, newest, strict=True)], len(known)

    def look(self, path: str, *, is_sweep: bool) -> Watched:
        """The overview of the run or the sweep in the directory ``path``."""
        if is_sweep:
            return Watched(sweep=sweep_view(SweepDir(path)))
        found = open_run(Path(path))
        return Watched(run=overview(found.dir, found.status(patient=True)), traceback=first_traceback(found.dir))

    def script(self, path: str) -> str:
        """The batch script, as it was submitted."""
        return RunDir(path).script.read_text(encoding="utf-8", errors="replace")

    def act(self, path: str, action: Action) -> str:
        """Carry out ``action``.

        Returns:
            A sentence for the user about what follows.

        Raises:
            HpcaccelError: the run is in a state that does not allow it, or Slurm refuses.
        """
        found = open_run(Path(path))
        if isinstance(found, SweepRun):
            return self._act_on_sweep(path, action)
        calls: dict[Action, Callable[[], None]] = {
            "stop": lambda: found.stop(then="pause"),
            "requeue": lambda: found.stop(then="requeue"),
            "finish": lambda: found.stop(then="finish"),
            "save": found.save,
            "cancel": found.cancel,
            "resume": found.resume,
        }
        calls[action]()
        if action == "resume":
            return f"{found.run_id} continues as job {found.job_id}"
        return f"cancelled {found.run_id}" if action == "cancel" else f"{action} requested for {found.run_id}"

    def _act_on_sweep(self, path: str, action: Action) -> str:
        from hpcaccel.errors import UserError
        from hpcaccel.sweeps.sweep_handle import Sweep

        sweep = Sweep(path)
        calls: dict[Action, Callable[[], object]] = {
            "stop": sweep.stop, "cancel": sweep.cancel, "resume": sweep.resume
        }  # fmt: skip
        if action not in calls:
            raise UserError(f"{sweep.run_id} is a sweep, which can be stopped, cancelled and resumed")
        calls[action]()
        done = {"stop": "stop requested for", "cancel": "cancelled", "resume": "resumed"}[action]
        return f"{done} sweep {sweep.run_id}"
