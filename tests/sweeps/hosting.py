"""A sweep directory as ``sweep start`` creates it, and a fake worker process whose trials the test simulates."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.core.durable_files import append_line, read_json, write_json
from hpcaccel.core.process_identity import process_start
from hpcaccel.core.records import AttemptEnd, AttemptStart, WorkerStart, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.submission.submit.build import all_or_nothing
from hpcaccel.sweeps import start_sweep
from hpcaccel.sweeps.journal_notes import OwnershipNotes
from hpcaccel.sweeps.journal_reader import StudyRecord, TrialRecord
from hpcaccel.sweeps.tuner import Tuner
from hpcaccel.sweeps.tuner_protocol import WorkerConnection

SPEC = """\
name: tune
entrypoint: {script: train.py, args: {lr: 0.5}}
slurm: {time: 60}
runtime: {stop: cooperative}
sweep:
  method: random
  metric: loss
  parameters:
    args.lr: {float: [0.1, 1.0]}
  max_trials: 3
  retries: 0
"""


def make_sweep(path: Path, *overrides: str, text: str = SPEC) -> SweepDir:
    """Create what ``sweep start`` writes, without starting a worker."""
    (path / "train.py").write_text("print('here')\n")
    (path / "sweep.yaml").write_text(text)
    plan = start_sweep.prepare_sweep(path / "sweep.yaml", cluster="local", runs_dir=path / "runs", overrides=overrides)
    with all_or_nothing(plan.dir):
        start_sweep._build(plan)
    return plan.dir


def read(sweep: SweepDir) -> StudyRecord:
    study = StudyRecord(sweep.journal)
    study.read()
    return study


def owner(sweep: SweepDir, trial: int) -> int | None:
    return OwnershipNotes(StudyRecord(sweep.journal)).read().owner(trial)


def trials(sweep: SweepDir, state: str) -> list[TrialRecord]:
    return [trial for trial in read(sweep).trials if trial.state == state]


OPEN: list[FakeHost] = []
"""Fake workers of the current test, closed at its end."""


class FakeHost:
    """A fake worker process and its tuner, which runs in a thread or in its own process.

    Args:
        gpus: number of GPUs in the allocation.
    """

    def __init__(
        self,
        sweep: SweepDir,
        index: int = 0,
        *,
        process: bool = False,
        slots: int = 1,
        gpus: int = 1,
        end_time: float | None = None,
        running: dict[str, int] | None = None,
    ) -> None:
        OPEN.append(self)
        self.sweep = sweep
        self.index = index
        to_chooser, self._sink = os.pipe()
        self._source, from_chooser = os.pipe()
        self._lines: list[dict[str, Any]] = []
        self._torn = b""
        self.error: BaseException | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.log = sweep.worker(index).host_log
        sweep.worker(index).prepare()
        self._account(gpus)
        hello = {"event": "hello", "worker": index, "job_id": "local-1", "restart_count": 0}
        self.say({**hello, "end_time": end_time, "slots": slots, "gpus": gpus, "running": running or {}})
        if process:
            self._start_process(to_chooser, from_chooser)
        else:
            self._thread = threading.Thread(target=self._work, args=(to_chooser, from_chooser), daemon=True)
            self._thread.start()

    def _account(self, gpus: int) -> None:
        pid = os.getpid()
        start = WorkerStart(time=time.time(), job_id="local-1", gpus=gpus, host=os.uname().nodename, pid=pid,
                            pid_start=process_start(pid) or 0)  # fmt: skip
        append_line(self.sweep.worker(self.index).account, to_dict(start))

    def _start_process(self, source: int, sink: int) -> None:
        command = [sys.executable, "-m", "hpcaccel.sweeps.tuner", str(self.sweep.path), str(self.index)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=source, stdout=sink, stderr=log)
        os.close(source)
        os.close(sink)

    def _work(self, source: int, sink: int) -> None:
        host = WorkerConnection(source, sink)
        try:
            Tuner(self.sweep, self.index, host.receive_hello(), host).work()
        except BaseException as error:  # kept for the test
            self.error = error
        finally:
            os.close(sink)
            os.close(source)

    # -- messages -------------------------------------------------------------------------------------------------

    def say(self, value: dict[str, Any]) -> None:
        os.write(self._sink, json.dumps(value).encode() + b"\n")

    def hear(self, seconds: float = 30) -> dict[str, Any]:
        """The next message; {} if the tuner has exited."""
        deadline = time.monotonic() + seconds
        while not self._lines:
            left = deadline - time.monotonic()
            assert left > 0, "the chooser is silent"
            if not select.select([self._source], [], [], left)[0]:
                continue
            data = os.read(self._source, 1 << 16)
            if not data:
                return {}
            *lines, self._torn = (self._torn + data).split(b"\n")
            self._lines += [json.loads(line) for line in lines]
        return self._lines.pop(0)

    def silent(self, seconds: float = 1.0) -> bool:
        return not self._lines and not select.select([self._source], [], [], seconds)[0]

    def hang_up(self) -> None:
        """Close the tuner's input, as if the worker process had exited. A tuner in a thread is joined."""
        if self._sink >= 0:
            os.close(self._sink)
            self._sink = -1
        if self.process is None:
            self._thread.join(20)
            assert not self._thread.is_alive(), "the chooser has not left"

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.hang_up()
        os.close(self._source)

    # -- simulated trials -----------------------------------------------------------------------------------------

    def trial(self, number: int) -> Played:
        return Played(self.sweep.trial(number), number)

    def ended(self, number: int, reason: str, decision: str = "end", **more: Any) -> None:
        """Record that the trial's supervisor has exited, and report it to the tuner."""
        played = self.trial(number)
        word = {"error_class": None, "detail": "", **more}
        played.close(reason, decision, **word)
        self.say({"event": "ended", "trial": number, "reason": reason, "decision": decision, "seconds": 1.0, **word})

    def play(self, loss: float | None, *, step: int = 10, reason: str = "completed", **more: Any) -> int:
        """Take the next trial, log a loss and end it. Returns its number."""
        message = self.hear()
        assert "run" in message, message
        number = int(message["run"])
        played = self.trial(number)
        if loss is not None:
            played.log(step, loss=loss)
        self.ended(number, reason, **more)
        return number


class Played:
    """The directory of a trial, written as by its ranks and its supervisor."""

    def __init__(self, run: RunDir, number: int) -> None:
        self.run = run
        self.number = number
        self.attempt = 1 + sum(path.name.isdecimal() for path in run.attempts.iterdir())

    def begin(self) -> None:
        if self.run.attempt(self.attempt).exists():
            return
        self.run.attempt(self.attempt).mkdir()
        append_line(self.run.ledger, to_dict(AttemptStart(attempt=self.attempt, time=time.time(), job_id="local-1")))

    def log(self, step: int, **values: float) -> None:
        line = {"step": step, "attempt": self.attempt, "time": time.time(), "values": values}
        append_line(self.run.metrics, line)

    def save(self, step: int) -> None:
        path = self.run.checkpoints / checkpoint_files.checkpoint_name(step)
        path.mkdir()
        write_json(path / checkpoint_files.MANIFEST, {"version": 1, "step": step})

    def close(self, reason: str, decision: str, *, error_class: str | None = None, detail: str = "") -> None:
        self.begin()
        ending: dict[str, Any] = {"reason": reason, "decision": decision, "error_class": error_class, "detail": detail}
        end = AttemptEnd(attempt=self.attempt, time=time.time(), seconds=2.0, **ending)
        append_line(self.run.ledger, to_dict(end))

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Stop requests to the trial."""
        return [value for path in sorted(self.run.control.glob("stop-*.json")) if (value := read_json(path))]

    @property
    def spec(self) -> dict[str, Any]:
        value = read_json(self.run.spec)
        assert value is not None
        return value
