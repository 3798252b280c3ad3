"""A user's directory with a sweep file, an in-memory Slurm, and a study with made-up trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage

from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.sweeps.definition import make_trial, read_definition
from hpcaccel.sweeps.journal import Journal
from hpcaccel.sweeps.start_sweep import PreparedSweep, prepare_sweep, start_sweep
from hpcaccel.sweeps.study import AskedTrial, SweepStudy
from hpcaccel.sweeps.sweep_handle import Sweep
from hpcaccel.sweeps.worker_jobs import WorkerArrays
from tests.slurm.fake_slurm import FakeSlurm

SPEC = """\
name: demo
entrypoint:
  script: train.py
  args: {lr: 3.0e-3, epochs: 2}
slurm:
  time: 60
runtime: {stop: signals}
sweep:
  method: random
  metric: loss
  parameters:
    args.lr: {float: [1.0e-4, 1.0e-1], log: true}
    args.depth: {choice: [2, 4, 8]}
  max_trials: 20
  workers: 4
"""


class Place:
    """The current directory of a test."""

    def __init__(self, path: Path, slurm: FakeSlurm) -> None:
        self.path = path
        self.slurm: Any = slurm
        self.runs = path / "runs"
        (path / "sweep.yaml").write_text(SPEC)
        (path / "train.py").write_text("print('hello')\n")

    def plan(self, *overrides: str, **options: Any) -> PreparedSweep:
        return prepare_sweep("sweep.yaml", cluster="slurm", overrides=overrides, slurm=self.slurm, **options)

    def start(self, *overrides: str) -> tuple[Sweep, WorkerArrays]:
        """Start the sweep in the in-memory Slurm."""
        sweep, arrays = start_sweep(self.plan(*overrides))
        return Sweep(sweep.path, slurm=self.slurm), arrays


class Trials:
    """Trials of a sweep, created and recorded without a worker."""

    def __init__(self, sweep: SweepDir) -> None:
        self.sweep = sweep
        self.definition = read_definition(sweep)
        self.study = SweepStudy(self.definition.spec, JournalStorage(Journal(sweep.journal)))

    def begin(self) -> int:
        asked = self.study.ask()
        assert isinstance(asked, AskedTrial)
        job = asked.job(self.definition.spec)
        make_trial(self.sweep, asked.number, definition=self.definition, job=job, overrides=asked.point)
        return asked.number

    def complete(self, *values: float) -> int:
        number = self.begin()
        self.study.complete(number, values)
        return number

    def fail(self, *, error_class: str = "exit", detail: str = "it fell over") -> int:
        number = self.begin()
        self.study.mark(number, {"error_class": error_class, "detail": detail})
        self.study.fail(number)
        return number
