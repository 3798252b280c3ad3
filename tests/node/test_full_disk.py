"""Tests of a full disk with the run directory: the run waits for space and loses no record."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.allocation import Slot
from hpcaccel.node.failures import disk_space
from hpcaccel.node.sweep import trial_supervisor
from hpcaccel.node.warm.eligible_runs import KeptStep

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
    """Wait until the rank has filled the disk and exited, and the supervisor cannot record that."""
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


def test_run_continues_as_soon_as_there_is_disk_space(
    local_run: Callable[..., LocalRun], mounted: Callable[[str], Path]
) -> None:
    run = local_run(FILLS_THE_DISK, within=mounted("size=1m"))
    begun(run)
    (run.dir.path / "ballast").unlink()
    assert run.wait() == 0
    assert run.ends == [("failed", "restart"), ("completed", "end")]
    assert run.lines("end")[0]["exit_code"] == 1


def test_run_waiting_for_disk_space_ends_on_sigterm(
    local_run: Callable[..., LocalRun], mounted: Callable[[str], Path]
) -> None:
    run = local_run(FILLS_THE_DISK, within=mounted("size=1m"))
    begun(run)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 2
    assert "Traceback" not in run.log


@pytest.mark.parametrize("waited", [False, True])
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, "disk"),
        (errno.EROFS, "disk"),
        (errno.EACCES, "disk"),
        (errno.EPERM, "disk"),
        (errno.EIO, "disk"),
        (errno.ENOENT, "refused"),
    ],
)
def test_trial_supervisor_reports_error_class_without_a_writable_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: str, waited: bool
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    def wait_and_fail(*_: object) -> int:
        return disk_space.retry_until_writable(fail, run=RunDir(tmp_path))

    monkeypatch.setattr(disk_space, "PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr(trial_supervisor, "_supervise", wait_and_fail if waited else fail)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    ours, theirs = os.pipe()
    full = open("/dev/full", "w")  # noqa: SIM115 - flushing at its end fails, as it should
    monkeypatch.setattr("sys.stdout", full)
    try:
        assert (
            trial_supervisor.run_trial(RunDir(tmp_path), slot=Slot(number=0, of=1), report_to=theirs, kept=KeptStep())
            == 2
        )
    finally:
        monkeypatch.undo()
        os.close(theirs)
    word = json.loads(os.read(ours, 1 << 12))
    os.close(ours)
    assert word["error_class"] == kind
    assert os.strerror(number) in word["detail"]
    with contextlib.suppress(OSError):
        full.close()
