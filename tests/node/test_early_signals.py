"""Tests of signals that arrived before the batch script became the batch step."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal
from hpcaccel.node import batch
signal.pthread_sigmask(signal.SIG_BLOCK, batch.WATCHED)
batch.take_over_signals()
print(sorted(number.name for number in signal.sigpending()))
print(signal.getsignal(signal.SIGUSR2).name)
print(os.environ.get("HPCACCEL_EARLY_SIGNALS"))
"""


def test_early_signals_are_pending_and_not_ignored_by_children() -> None:
    script = "trap '' USR2; exec \"$@\""
    result = subprocess.run(
        ["bash", "-c", script, "-", sys.executable, "-c", PROGRAM],
        env={"HPCACCEL_EARLY_SIGNALS": " TERM USR2", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines() == ["['SIGTERM', 'SIGUSR2']", "SIG_DFL", "None"]
