"""Sweep commands on a real Slurm: stop, resume, and submission of the best trial."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import read_lines
from hpcaccel.submission.submit.api import submit
from hpcaccel.sweeps.sweep_handle import sweep as start
from hpcaccel.view.run_overview import overview

from .dev_cluster import Cluster, wait_until

Lease = Callable[[int], list[str]]

COUNTS = (Path(__file__).parent / "programs" / "counts_to_forty.py").read_text()
"""Counts to forty, from where it was stopped; the first two trials are slow until then."""

SPEC = """\
name: searched
entrypoint: {script: train.py, args: {lr: 1.0}}
slurm: {partition: gpu, ntasks_per_node: 1, mem: 100M, time: 5, nodelist: NODE}
runtime: {stop: signals}
resilience: {preflight: "off"}
sweep:
  method: grid
  metric: loss
  parameters: {args.lr: {choice: [1.0, 2.0, 3.0]}}
  workers: 2
"""


@pytest.mark.chaos  # on this machine: tests/cli/test_sweep.py
def test_sweep_is_stopped_and_resumed_and_its_best_trial_submitted(
    cluster: Cluster, lease: Lease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**cluster.env, "XDG_STATE_HOME": str(tmp_path / "state")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(COUNTS)
    Path("sweep.yaml").write_text(SPEC.replace("NODE", lease(1)[0]))
    sweep = start("sweep.yaml", cluster="slurm")
    try:
        begun = [sweep.dir.trial(number).foreign_metrics(1) for number in (0, 1)]
        wait_until(lambda: all(path.exists() for path in begun), "two trials run")
        sweep.throttle(2)
        sweep.stop()
        paused = sweep.wait(600)
        assert (paused.state, paused.workers, paused.trials["running"]) == ("paused", {"paused": 2}, 2)
        sweep.resume()
        done = sweep.wait(600)
    finally:
        if not sweep.status().ended:
            sweep.cancel()
    assert (done.state, done.trials["complete"], len(sweep.trials)) == ("completed", 3, 3)
    assert [row["attempts"] for row in sweep.table()] == [2, 2, 1]
    for number in range(3):
        lines = [read_lines(sweep.dir.trial(number).foreign_metrics(attempt)) for attempt in (1, 2)]
        assert [line["step"] for attempt in lines for line, _ in attempt] == list(range(1, 41))
    best = sweep.best()
    assert (best.trial, best.values) == (0, {"loss": 1 / 40})
    run = submit(best.spec, cluster="slurm")
    assert overview(run.dir, run.wait(600)).last_loss == best.values["loss"]
