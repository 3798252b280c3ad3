"""``hpcaccel sweep`` on a machine without Slurm."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Result, Shell

SPEC = """\
name: search
entrypoint:
  script: train.py
  args: {lr: 1.0e-2}
slurm: {ntasks_per_node: 1, time: 10}
runtime: {stop: signals, seed: 3}
resilience: {restart_in_place: 0}
sweep:
  method: grid
  metric: loss
  parameters:
    args.lr: {choice: [1.0e-1, 1.0e-2, 1.0e-3]}
    args.opt: {choice: [sgd, adam]}
  max_trials: 3
  retries: 0
"""

TRAIN = """\
import json, os, sys
lr = float(sys.argv[sys.argv.index("--lr") + 1])
if lr > 0.05:
    sys.exit("diverged")
with open(os.environ["HPCACCEL_METRICS"], "a") as file:
    for step in (1, 2, 3):
        print(json.dumps({"step": step, "loss": lr / step}), file=file)
"""


@pytest.fixture
def sweep(shell: Shell) -> Path:
    shell.write("train.py", TRAIN)
    return shell.write("sweep.yaml", SPEC)


def started(shell: Shell, *words: str) -> dict[str, str]:
    """What `sweep start --json` prints."""
    result = shell("sweep", "start", "sweep.yaml", "--cluster", "local", "--json", *words)
    assert result.returncode == 0, result.stderr
    said: dict[str, str] = json.loads(result.stdout)
    return said


def test_sweep_runs_and_its_best_trial_is_submitted_again(shell: Shell, sweep: Path) -> None:
    now = json.loads(shell("sweep", "start", "sweep.yaml", "--cluster", "local", "--wait", "--json").stdout)
    assert (now["state"], now["workers"], now["best"]["trial"]) == ("completed", {"completed": 1}, 0)
    assert {state: count for state, count in now["trials"].items() if count} == {"complete": 1, "failed": 2}
    name = now["run_id"]
    shown = shell("status", name).stdout
    assert "trials     3 of 3: 1 complete, 2 failed" in shown
    assert "loss 0.003333  trial 0" in shown
    assert "2 × exit, most recently trial 2" in shown
    assert shell("list").stdout.count(name) == 1

    rows = list(csv.DictReader(io.StringIO(shell("sweep", "table", "search").stdout)))
    assert [(row["state"], row["loss"], row["args.opt"]) for row in rows][1:] == [
        ("failed", "", "sgd"),
        ("failed", "", "adam"),
    ]
    assert json.loads(shell("sweep", "table", name, "--json").stdout)[0]["loss"] == pytest.approx(0.01 / 3)
    assert "diverged" in shell("logs", f"{name}_1").stdout

    best = shell.write("best.yaml", shell("sweep", "best", name).stdout).read_text()
    assert f"# Trial 0 of sweep {name}: loss 0.00333333" in best
    assert shell("validate", "best.yaml").returncode == 0
    assert "can be submitted" in shell("submit", "best.yaml", "--cluster", "local", "--dry-run").stdout
    once_more = json.loads(shell("submit", "best.yaml", "--cluster", "local", "--wait", "--json").stdout)
    assert once_more["last_loss"] == now["best"]["values"]["loss"]

    assert shell("sweep", "plot", name, "-o", "sweep.html").returncode == 0
    page = (shell.folder / "sweep.html").read_text()
    assert page.count("<svg") == 3
    assert "script" not in page
    assert shell("wait", name).returncode == 0


def test_sweep_dry_run_prints_the_plan_and_creates_no_files(shell: Shell, sweep: Path) -> None:
    before = shell.files()
    result = shell("sweep", "start", "sweep.yaml", "sweep.max_gpu_hours=7", "--cluster", "local", "--dry-run")
    assert result.returncode == 0
    assert "at most 3, grid over 6 points" in result.stdout
    assert "0: args.lr=0.01" in result.stdout
    assert "in total: 7 (max_gpu_hours)" in result.stdout
    assert "the grid has 6 trials, but max_trials allows only the first 3" in result.stderr
    assert shell.files() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep", "start", "job.yaml"], "sweep"),
        (["sweep", "status", "nothing"], "no run 'nothing'"),
        (["submit", "sweep.yaml", "--cluster", "local"], "hpcaccel sweep start"),
        (["sweep", "start", "sweep.yaml"], "there is no Slurm on this machine"),
        (["sweep", "start", "sweep.yaml", "sweep.metric=null", "--cluster", "local"], "sweep.metric"),
    ],
)
def test_bad_sweep_command_is_refused(
    shell: Shell, sweep: Path, spec: Path, refused: Callable[[Result[str]], str], words: list[str], message: str
) -> None:
    assert message in refused(shell(*words))


def test_sweep_commands_refuse_runs_and_run_commands_refuse_sweeps(
    shell: Shell, sweep: Path, spec: Path, refused: Callable[[Result[str]], str]
) -> None:
    run = json.loads(shell("submit", "job.yaml", "--cluster", "local", "--json").stdout)["run_id"]
    name = started(shell, "sweep.max_trials=1")["run_id"]
    assert f"hpcaccel status {run}" in refused(shell("sweep", "status", run))
    for command in ("logs", "report", "stacks", "shell"):
        assert f"choose one of its trials, such as {name}_0" in refused(shell(command, name))
    assert shell("wait", name).returncode == 0
    assert "which has no queue" in refused(shell("sweep", "throttle", name, "2"))
    assert ".html, .png" in refused(shell("sweep", "plot", name, "-o", "sweep.txt"))


def test_sweep_start_fails_if_its_run_directory_cannot_be_created(
    shell: Shell, sweep: Path, refused: Callable[[Result[str]], str]
) -> None:
    shell.write("runs", "a file where the folder of runs would be")
    message = refused(shell("sweep", "start", "sweep.yaml", "sweep.max_trials=6", "--cluster", "local"))
    assert "cannot create the run directory" in message
