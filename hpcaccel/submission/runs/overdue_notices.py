"""Delivery of notices that a killed batch step left behind, started by the first program that reads the ended run."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from typing import Protocol

from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.launch_spec import find_launch
from hpcaccel.core.notice_message import END_EVENTS, OUTBOX, evidence_bytes
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.run_ledger import RunLedger
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.submission.runs.status import RunStatus

__all__ = ["send_overdue_notices"]

MOST_PROCESSES = 8
"""Of an array, at most this many tasks are handled in one call; the next call continues."""
_SETTLED = ("delivered", "given_up")


class EndedState(Protocol):
    """The end of a run or a sweep: a ``RunStatus``, or the overview of a sweep."""

    @property
    def ended(self) -> bool: ...
    @property
    def state(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def note(self) -> str: ...


def send_overdue_notices(run: RunDir, status: EndedState) -> bool:
    """Start a process that sends the notices of an ended run or sweep that are still due. Returns whether it was
    started. Tasks of an array have a process each.

    The process tries each of them once, and reports to the run's ``slurm.log``. This call does not wait for it.
    Only the run's owner sends: a colleague of a shared run has another webhook.
    """
    if isinstance(status, RunStatus) and status.tasks and not isinstance(run, SweepDir):
        tasks = (send_overdue_notices(run.task(index), task) for index, task in enumerate(status.tasks))
        return bool(list(islice((started for started in tasks if started), MOST_PROCESSES)))
    if not _is_due(run, status):
        return False
    words = [sys.executable, "-m", "hpcaccel.node", "overdue-notices", str(run.path), status.state, status.detail]
    # The shell leaves the process behind, as a child of init: nobody has to wait for it.
    detached = '"$@" < /dev/null >> "$0" 2>&1 &'
    subprocess.run(["/bin/sh", "-c", detached, str(run.slurm_log), *words], check=False, start_new_session=True)
    return True


def _is_due(run: RunDir, status: EndedState) -> bool:
    """Whether a notice may be due: the run sends notices and has ended, and no notice of its end is delivered. For a
    sweep: no earlier process has settled all that its workers wrote."""
    outbox = run.path / OUTBOX
    if not status.ended or status.note or run.is_trial or run.is_worker or not outbox.exists():
        return False
    launch = find_launch(run)
    if launch is None or not launch.notify.sends or outbox.stat().st_uid != os.geteuid():
        return False
    states: dict[str, str] = {}
    for line, _ in read_lines(outbox):
        if line.get("state") == "settled" and line.get("ledger_bytes") == evidence_bytes(run):
            return False
        if isinstance(line.get("key"), str):
            states[line["key"]] = str(line.get("state"))
    if isinstance(run, SweepDir) or any(state not in _SETTLED for state in states.values()):
        return True
    newest = max(RunLedger.read(run).attempts, default=0)
    return not any(f"{newest}.{event}" in states for event in END_EVENTS)
