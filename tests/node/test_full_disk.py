"""The disk with the run directory is full: the run waits for room, and nothing of it is lost."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from .conftest import LocalRun, outcome

FILLS_THE_DISK = f"""
import os, sys
folder = os.environ["HPCACCEL_RUN_DIR"] + "/attempts/" + os.environ["HPCACCEL_ATTEMPT"]
if os.environ["HPCACCEL_ATTEMPT"] == "2":
    {outcome(step=5, resume=False, reason="completed")}
    sys.exit(0)
with open(os.environ["HPCACCEL_RUN_DIR"] + "/attempts.jsonl", "ab") as ledger:
    ledger.write(b" " * (4096 - ledger.tell() % 4096))  # a block that was begun would have room for a line or two
ballast = open(os.environ["HPCACCEL_RUN_DIR"] + "/ballast", "wb", buffering=0)
try:
    while True:
        ballast.write(bytes(4096))
except OSError:
    print("full", flush=True)
sys.exit(1)
"""


def begun(run: LocalRun) -> None:
    """Until the rank has filled the disk and is gone, and the supervisor cannot write that down."""
    run.start()
    ballast = run.dir.path / "ballast"
    size, end = -1, time.monotonic() + 30
    while size < 1 or ballast.stat().st_size != size:
        assert time.monotonic() < end
        size = ballast.stat().st_size if ballast.exists() else -1
        time.sleep(1)
    assert run.process is not None
    assert run.process.poll() is None, run.log
    assert run.ends == []


def test_the_run_goes_on_as_soon_as_there_is_room(
    local_run: Callable[..., LocalRun], mounted: Callable[[str], Path]
) -> None:
    run = local_run(FILLS_THE_DISK, within=mounted("size=1m"))
    begun(run)
    (run.dir.path / "ballast").unlink()
    assert run.wait() == 0
    assert run.ends == [("failed", "restart"), ("completed", "end")]
    assert run.lines("end")[0]["exit_code"] == 1


def test_who_waits_for_room_can_be_ended(local_run: Callable[..., LocalRun], mounted: Callable[[str], Path]) -> None:
    run = local_run(FILLS_THE_DISK, within=mounted("size=1m"))
    begun(run)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 2
    assert "Traceback" not in run.log
