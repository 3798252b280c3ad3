"""A sweep over programs of other trainers: the metric comes through the callback, and a bad trial ends at one step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import read_json, read_lines
from hpcaccel.sweeps import start_sweep
from tests.cluster.dev_cluster import wait_until
from tests.sweeps.hosting import read, trials

pytest.importorskip("optuna")
pytestmark = [pytest.mark.torch, pytest.mark.chaos]

PROGRAMS = Path(__file__).parent / "programs"
SPEC = """\
name: tune
entrypoint:
  script: {script}
  args: {{{directory}: "{{run_dir}}/out", steps: 40, pause: 0.1, lr: 0.05}}
slurm: {{nodes: 1, gpus_per_node: 0, ntasks_per_node: 2, time: 60}}
resilience: {{preflight: "off"}}
sweep:
  method: grid
  pruner: {{median: {{startup_trials: 1, warmup_steps: 5}}}}
  metric: loss
  parameters:
    args.lr: {{choice: [0.05, 1.0e-9]}}
  workers: 1
"""


@pytest.mark.parametrize(
    ("trainer", "directory"),
    [("accelerate", "output_dir"), ("transformers", "output_dir"), ("lightning", "root"), ("fabric", "output_dir")],
)
def test_trial_that_does_not_learn_is_pruned_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainer: str, directory: str
) -> None:
    pytest.importorskip("lightning" if trainer == "fabric" else trainer)
    for name in [name for name in os.environ if name.startswith(("HPCACCEL_", "SLURM_")) and "TEST" not in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    script = PROGRAMS / f"train_{trainer}.py"
    Path("sweep.yaml").write_text(SPEC.format(script=script, directory=directory))
    plan = start_sweep.prepare_sweep("sweep.yaml", cluster="local", runs_dir=tmp_path / "runs")
    start_sweep.start_sweep(plan)
    sweep = plan.dir
    wait_until(
        lambda: len([trial for trial in read(sweep).trials if trial.is_finished]) == 2,
        "both trials",
        timeout_seconds=300,
    )
    log = sweep.trial(1).attempt(1)
    (good,), (bad,) = trials(sweep, "complete"), trials(sweep, "pruned")
    assert (good.params["args.lr"], bad.params["args.lr"]) == (0.05, 1e-9)
    ends: dict[int, Any] = {
        trial.number: [line for line, _ in read_lines(sweep.trial(trial.number).ledger) if line["event"] == "end"]
        for trial in (good, bad)
    }
    (completed,), (pruned,) = ends[good.number], ends[bad.number]
    assert (completed["reason"], completed["last_step"]) == ("completed", 40)
    assert pruned["reason"] == "pruned", [path.read_text()[-2000:] for path in log.glob("*.log")]
    assert 5 <= pruned["last_step"] < 40
    assert not list(sweep.trial(bad.number).path.glob("out/*")), "a pruned trial saves nothing"
    outcome = read_json(sweep.trial(bad.number).outcome(1)) or {}
    assert outcome["step"] == pruned["last_step"]
