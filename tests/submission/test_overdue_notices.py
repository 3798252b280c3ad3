"""Which ended runs have notices that their batch step did not send, and who sends them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.notice_message import OUTBOX, evidence_bytes
from hpcaccel.core.records import AttemptEnd, AttemptStart, WorkerSeen, WorkerStart, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.submission.runs import overdue_notices
from hpcaccel.submission.runs.overdue_notices import send_overdue_notices
from hpcaccel.submission.runs.status import RunStatus
from tests.node.test_notices import LAUNCH, secret_file
from tests.node.webhook_server import Receiver


def ended(run: RunDir, state: Any = "lost", **values: Any) -> RunStatus:
    return RunStatus(run_id=run.run_id, name="toy", state=state, detail="the batch step ended", **values)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that sends notices, and whose batch step was killed in its first attempt."""
    run = RunDir(tmp_path / "toy" / "20261128-101500-4f2a")
    run.create()
    notify = {"events": ["start", "failure", "end"], "webhook_file": "/nowhere"}
    write_json(run.spec, {"version": 1, "spec": {"name": "toy", "notify": notify}, "launch": LAUNCH})
    append_line(run.ledger, to_dict(AttemptStart(attempt=1, time=10.0, job_id="7")))
    append_line(run.path / "notices.jsonl", {"state": "opened", "since": 1.0})
    for state in ("trying", "delivered"):
        append_line(run.path / "notices.jsonl", {"state": state, "key": "1.start"})
    return run


def test_a_killed_run_tells_its_end_when_somebody_looks(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = Receiver()
    try:
        notify = {"events": ["end"], "webhook_file": str(secret_file(run.path.parent / "secret", server.url))}
        write_json(run.spec, {"version": 1, "spec": {"name": "toy", "notify": notify}, "launch": LAUNCH})
        append_line(run.path / "notices.jsonl", {"state": "opened", "since": 1.0})
        assert send_overdue_notices(run, ended(run, "cancelled"))
        deadline = time.monotonic() + 90
        while "settled" not in (run.path / "notices.jsonl").read_text():
            assert time.monotonic() < deadline, run.slurm_log.read_text()
            time.sleep(0.05)
        assert server.events == ["end:1"]
        assert server.got[0]["reason"] == "cancelled"
        assert not send_overdue_notices(run, ended(run, "cancelled"))
    finally:
        server.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories for which a process was started. None is."""
    found: list[str] = []
    monkeypatch.setattr(subprocess, "run", lambda words, **_: found.append(words[-3]))
    return found


def test_a_killed_sweep_is_looked_through_until_all_is_settled(run: RunDir, started: list[str]) -> None:
    sweep = SweepDir(run.path.parent / "20261128-101501-5a3b")
    sweep.create()
    notify = {"events": ["end"], "webhook_file": "/nowhere"}
    write_json(sweep.spec, {"version": 1, "spec": {"name": "toy", "notify": notify}, "launch": LAUNCH})
    append_line(sweep.path / OUTBOX, {"state": "opened", "since": 1.0})
    sweep.worker(0).prepare()
    append_line(sweep.worker(0).account, to_dict(WorkerStart(time=10.0, job_id="7_0")))
    workers = (ended(sweep.worker(0)),)
    assert send_overdue_notices(sweep, ended(sweep, tasks=workers))
    assert started == [str(sweep.path)]
    append_line(sweep.path / OUTBOX, {"state": "settled", "ledger_bytes": evidence_bytes(sweep)})
    assert not send_overdue_notices(sweep, ended(sweep, tasks=workers))
    append_line(sweep.worker(0).account, to_dict(WorkerSeen(time=20.0)))
    assert send_overdue_notices(sweep, ended(sweep, tasks=workers))


def test_tasks_of_an_array_are_looked_through(run: RunDir, started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    array = RunDir(run.path.parent / "20261128-101502-6b4c")
    array.create()
    for index in range(3):
        shutil.copytree(run.path, array.task(index).path)
    states = [ended(array.task(0)), ended(array.task(1), "running"), ended(array.task(2))]
    monkeypatch.setattr(overdue_notices, "MOST_PROCESSES", 1)
    assert send_overdue_notices(array, ended(array, tasks=tuple(states)))
    assert started == [str(array.task(0).path)]
    monkeypatch.setattr(overdue_notices, "MOST_PROCESSES", 8)
    assert send_overdue_notices(array, ended(array, tasks=tuple(states)))
    assert started[1:] == [str(array.task(0).path), str(array.task(2).path)]


@pytest.mark.parametrize("why", ["running", "doubt", "told", "no webhook", "never began", "a colleague's"])
def test_nothing_is_started_without_need(run: RunDir, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    status = ended(run)
    if why == "running":
        status = ended(run, "running")
    elif why == "doubt":
        status = ended(run, note="Slurm does not respond")
    elif why == "told":
        append_line(run.ledger, to_dict(AttemptEnd(attempt=1, time=20.0, reason="completed", decision="end")))
        append_line(run.path / "notices.jsonl", {"state": "delivered", "key": "1.end"})
    elif why == "no webhook":
        write_json(run.spec, {"version": 1, "spec": {"name": "toy"}, "launch": LAUNCH})
    elif why == "never began":
        (run.path / "notices.jsonl").unlink()
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not send_overdue_notices(run, status)
