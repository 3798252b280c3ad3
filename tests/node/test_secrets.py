"""Tests that nothing that the batch step writes contains a secret from a program's exception."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.launch_spec import read_launch
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.allocation import LocalAllocation
from hpcaccel.node.attempt import Attempt
from hpcaccel.node.failures import disk_space
from hpcaccel.node.supervisor import Supervisor

from .conftest import LocalRun
from .sweeping import IN_TURN, Sweep

SECRET = "s3cr3t-Token.value+1"
TELLS = "import os\nraise ValueError('refused: ' + os.environ['TOKEN'])\n"


def with_secret(run: RunDir) -> None:
    document = read_json(run.spec) or {}
    document["spec"]["environment"] = {"secrets": ["TOKEN"]}
    write_json(run.spec, document)


def holding(folder: Path) -> list[str]:
    """Files that contain the secret, as paths in ``folder``."""
    files = [path for path in folder.rglob("*") if path.is_file() and SECRET in path.read_text(errors="replace")]
    return sorted(str(path.relative_to(folder)) for path in files)


def test_only_rank_logs_of_a_run_contain_the_secret(
    local_run: Callable[..., LocalRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    run = local_run(TELLS)
    with_secret(run.dir)
    assert run.run() == 1
    assert [line["detail"][-22:] for line in run.lines("end")] == ["ValueError: refused: ***"[-22:]] * 2
    assert "ValueError: refused: ***" in run.dir.supervisor_log(1).read_text()
    assert "ValueError: refused: ***" in run.log
    assert holding(run.dir.path) == ["attempts/1/0.log", "attempts/2/0.log"]  # the program's own output


@pytest.mark.parametrize("length", range(430, 500, 7))
def test_secret_at_the_cut_of_a_long_message_is_masked(
    local_run: Callable[..., LocalRun], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """The run directory has no space either, which is appended to the cut message of the exception."""
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.setattr(
        disk_space, "shortage", lambda *_, **__: disk_space.DiskShortage("disk_full", "the disk is full")
    )
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
    run = local_run("")
    with_secret(run.dir)
    run.dir.attempt(1).mkdir()
    text = f"Traceback (most recent call last):\nOSError: [Errno 28] {'x' * length} {SECRET} No space left on device\n"
    run.dir.rank_log(1, 0).write_text(text)
    launch = read_launch(run.dir)
    attempt = Attempt(Supervisor(run.dir, launch, LocalAllocation(run.dir, launch)).job)
    detail = attempt.find_cause(1).detail
    assert detail.endswith(" are free")
    assert SECRET[:5] not in detail


def test_only_rank_logs_of_a_sweep_contain_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    sweep = Sweep(tmp_path, TELLS, IN_TURN.format(count=1))
    trial = sweep.trial(0)
    for one in (sweep.dir, trial):
        with_secret(one)
    assert sweep.run() == 0
    assert "ValueError: refused: ***" in sweep.worker.host_log.read_text()
    assert holding(sweep.dir.path) == ["trials/0/attempts/1/0.log", "trials/0/attempts/2/0.log"]
