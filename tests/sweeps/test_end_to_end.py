"""A local sweep with all its processes: workers, tuners, supervisors, and a program that does not import hpcaccel."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import read_json, read_lines
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.sweeps import start_sweep
from tests.sweeps.hosting import read, trials

pytest.importorskip("optuna")

SPEC = """\
name: tune
entrypoint: {script: train.py, args: {lr: 0.5}}
slurm: {time: 60}
runtime: {stop: signals}
resilience: {preflight: "off"}
sweep:
  method: random
  pruner: {asha: {min_steps: 3, reduction_factor: 2}}
  metric: loss
  parameters:
    args.lr: {float: [0.1, 1.0]}
  max_trials: 5
  workers: 2
"""

TRAIN = """\
import json, os, pathlib, sys, time
lr = float(sys.argv[sys.argv.index("--lr") + 1])
with open(os.environ["HPCACCEL_METRICS"], "a", buffering=1) as metrics:
    for step in range(1, 7):
        metrics.write(json.dumps({"step": step, "loss": lr + 1 / step}) + "\\n")
        while step == 2 and pathlib.Path("hold").exists():
            time.sleep(0.02)
        time.sleep(0.02)
"""


def test_killed_workers_trial_is_rerun_and_every_trial_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("HPCACCEL_", "SLURM_")) and "TEST" not in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    Path("sweep.yaml").write_text(SPEC)
    Path("train.py").write_text(TRAIN)
    Path("hold").write_text("")
    plan = start_sweep.prepare_sweep("sweep.yaml", cluster="local", runs_dir=tmp_path / "runs")
    start_sweep.start_sweep(plan)
    sweep = plan.dir
    try:
        eventually(lambda: len(logged(sweep)) == 2)
        os.kill(pid_of(sweep, 1), signal.SIGKILL)
        Path("hold").unlink()
        eventually(lambda: len([trial for trial in read(sweep).trials if trial.is_finished]) == 5)
        eventually(lambda: " ended: completed" in sweep.worker(0).host_log.read_text())
    finally:
        for index in (0, 1):
            if alive(pid_of(sweep, index)):
                os.kill(pid_of(sweep, index), signal.SIGKILL)
    assert len(trials(sweep, "complete")) >= 1
    assert not trials(sweep, "failed"), [trial.user_attrs for trial in trials(sweep, "failed")]
    for trial in trials(sweep, "complete"):
        assert (trial.values or [0.0])[0] == pytest.approx(trial.params["args.lr"] + 1 / 6)
    ends = [
        [line["reason"] for line, _ in read_lines(sweep.trial(number).ledger) if line["event"] == "end"]
        for number in range(5)
    ]
    assert sorted(map(len, ends)) == [1, 1, 1, 1, 2]  # the killed worker's trial has two attempts, the others one
    assert all(reasons[-1] in ("completed", "pruned") for reasons in ends)


def logged(sweep: SweepDir) -> list[int]:
    """Numbers of the trials that are at step 2."""
    files = [(number, sweep.trial(number).foreign_metrics(1)) for number in sweep.trial_numbers()]
    return [number for number, path in files if path.exists() and path.read_text().count("\n") == 2]


def pid_of(sweep: SweepDir, worker: int) -> int:
    process = read_json(sweep.worker(worker).local_process)
    assert process is not None
    return int(process["pid"])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def eventually(question: object, *, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not question():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)
