"""A program prints a secret in its last exception: nothing that the batch step writes holds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.rundir import RunDir, read_json, write_json

from .conftest import LocalRun
from .sweeping import IN_TURN, Sweep

SECRET = "s3cr3t-Token.value+1"
TELLS = "import os\nraise ValueError('refused: ' + os.environ['TOKEN'])\n"


def with_secret(run: RunDir) -> None:
    document = read_json(run.spec) or {}
    document["spec"]["environment"] = {"secrets": ["TOKEN"]}
    write_json(run.spec, document)


def holding(folder: Path) -> list[str]:
    """Files that hold the value, as paths in ``folder``."""
    files = [path for path in folder.rglob("*") if path.is_file() and SECRET in path.read_text(errors="replace")]
    return sorted(str(path.relative_to(folder)) for path in files)


def test_a_run(local_run: Callable[..., LocalRun], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    run = local_run(TELLS)
    with_secret(run.dir)
    assert run.run() == 1
    assert [line["detail"][-22:] for line in run.lines("end")] == ["ValueError: refused: ***"[-22:]] * 2
    assert "ValueError: refused: ***" in run.dir.supervisor_log(1).read_text()
    assert "ValueError: refused: ***" in run.log
    assert holding(run.dir.path) == ["attempts/1/0.log", "attempts/2/0.log"]  # the program's own


def test_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    sweep = Sweep(tmp_path, TELLS, IN_TURN.format(count=1))
    trial = sweep.trial(0)
    for one in (sweep.dir, trial):
        with_secret(one)
    assert sweep.run() == 0
    assert "ValueError: refused: ***" in sweep.worker.host_log.read_text()
    assert holding(sweep.dir.path) == ["trials/0/attempts/1/0.log", "trials/0/attempts/2/0.log"]
