"""Delivery of notices that a killed batch step left behind, started by the first program that sees the run ended."""

from __future__ import annotations

import os
import subprocess
import sys

from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.launch_spec import find_launch
from hpcaccel.core.notice_message import END_EVENTS, OUTBOX
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.run_ledger import RunLedger
from hpcaccel.submission.runs.status import RunStatus

__all__ = ["send_overdue_notices"]

_SETTLED = ("delivered", "given_up")


def send_overdue_notices(run: RunDir, status: RunStatus) -> bool:
    """Start a process that sends the notices of an ended run that are still due. Returns whether it was started.

    The process tries each of them once, and reports to the run's ``slurm.log``. This call does not wait for it.
    Only the run's owner sends: a colleague of a shared run has another webhook.
    """
    if not _is_due(run, status):
        return False
    words = [sys.executable, "-m", "hpcaccel.node", "overdue-notices", str(run.path), status.state, status.detail]
    # The shell leaves the process behind, as a child of init: nobody has to wait for it.
    detached = '"$@" < /dev/null >> "$0" 2>&1 &'
    subprocess.run(["/bin/sh", "-c", detached, str(run.slurm_log), *words], check=False, start_new_session=True)
    return True


def _is_due(run: RunDir, status: RunStatus) -> bool:
    """Whether a notice may be due: the run sends notices and has ended, and no notice of its end is delivered."""
    outbox = run.path / OUTBOX
    if not status.ended or status.note or status.tasks or run.is_trial or run.is_worker or not outbox.exists():
        return False
    launch = find_launch(run)
    if launch is None or not launch.notify.sends or outbox.stat().st_uid != os.geteuid():
        return False
    states: dict[str, str] = {}
    for line, _ in read_lines(outbox):
        if line.get("state") == "settled" and line.get("ledger_bytes") == run.ledger.stat().st_size:
            return False
        if isinstance(line.get("key"), str):
            states[line["key"]] = str(line.get("state"))
    if any(state not in _SETTLED for state in states.values()):
        return True
    newest = max(RunLedger.read(run).attempts, default=0)
    return not any(f"{newest}.{event}" in states for event in END_EVENTS)
