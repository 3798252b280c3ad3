"""Sweeps made by hand, with small programs as trials and a small script as the chooser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import read_lines, write_json
from hpcaccel.core.process_identity import process_start
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir, new_run_id
from hpcaccel.core.stop_requests import StopRequest
from hpcaccel.core.sweep_dir import SweepDir

from .conftest import RESILIENCE, ROOT

CHOOSER = """
import json, os, sys, time
folder, worker = sys.argv[1:]
heard = open(f"{folder}/heard-{worker}.jsonl", "a")
def hear():
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    heard.write(line)
    heard.flush()
    return json.loads(line)
def say(**message):
    print(json.dumps(message), flush=True)
hello = hear()
"""

IN_TURN = """
for number in range({count}):
    say(run=number, slot=0)
    while (event := hear())["event"] != "ended":
        pass
say(end=True, why="that was all")
"""
"""A chooser that runs ``count`` trials, one after another."""

CONTINUES = """
# What is to be continued comes first; the journal of this chooser is one file.
def ended(number):
    lines = [json.loads(line) for line in open(f"{folder}/trials/{number}/attempts.jsonl")] if os.path.exists(
        f"{folder}/trials/{number}/attempts.jsonl") else []
    return bool(lines) and lines[-1]["event"] == "end" and lines[-1]["decision"] == "end"
for number in NUMBERS:
    if not ended(number):
        say(run=number, slot=0)
        while (event := hear())["event"] != "ended":
            if event["event"] == "stopping":
                while hear():
                    pass
say(end=True, why="that was all")
"""

STOPS_AND_GOES_ON = (Path(__file__).parent / "programs" / "stops_once.py").read_text()
"""A program whose first attempt runs until it is stopped, and whose second one succeeds."""


class Sweep:
    """A sweep of one worker on the local backend."""

    def __init__(self, path: Path, program: str, chooser: str, *, pack: int = 1, **launch: Any) -> None:
        self.dir = SweepDir(path / new_run_id())
        self.dir.create()
        self.worker = self.dir.worker(0)
        self.worker.prepare()
        script = self.dir.path / "program.py"
        script.write_text(program)
        talker = self.dir.path / "chooser.py"
        talker.write_text(CHOOSER + textwrap.dedent(chooser))
        resilience = {**RESILIENCE, **launch.pop("resilience", {})}
        self.document: dict[str, Any] = {
            "version": 1,
            "spec": {"resilience": resilience},
            "launch": {
                "kind": "program",
                "program": [sys.executable, str(script)],
                "python": sys.executable,
                "pythonpath": [],
                "workdir": str(path),
                "backend": "local",
                "nodes": 1,
                "ranks_per_node": 1,
                "stop": "cooperative",
                "srun": [],
                "setup_per_node": [],
                **launch,
            },
        }
        chooser_command = [sys.executable, str(talker)]
        write_json(self.dir.spec, {**self.document, "sweep": {"pack": pack}, "chooser": chooser_command})
        self.dir.node_program.write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom hpcaccel.node.__main__ import main\nmain()\n"
        )
        self.dir.script.write_text(f"exec {sys.executable} {self.dir.node_program} batch work {self.dir.path} 0\n")
        self.process: subprocess.Popen[bytes] | None = None

    def trial(self, number: int) -> RunDir:
        """Create a trial's directory, as a chooser does before it requests the trial."""
        run = self.dir.trial(number)
        run.create()
        write_json(run.spec, self.document)
        return run

    def start(self, job_id: str = "local-00000001_0", **variables: str) -> None:
        with self.worker.slurm_log.open("ab") as log:
            self.process = subprocess.Popen(
                ["bash", str(self.dir.script)],
                env={**os.environ, "HPCACCEL_LOCAL_JOB": job_id, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout: float = 60) -> int:
        assert self.process is not None
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout} s:\n{self.log}")

    def run(self) -> int:
        self.start()
        return self.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def ask(self, folder: RunDir, then: str, *, reason: str = "stop", name: str = "stop-1") -> None:
        request = StopRequest(reason=reason, then=then, time=time.time())  # type: ignore[arg-type]
        write_json(folder.control / f"{name}.json", to_dict(request))

    def until(self, condition: Callable[[], Any], what: str, *, timeout: float = 30) -> None:
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end:
                pytest.fail(f"not after {timeout} s: {what}\n{self.log}")
            time.sleep(0.02)

    def wait_for(self, number: int, text: str, *, attempt: int = 1) -> str:
        """Wait until a trial's rank has printed ``text``; return all of its output."""
        log = self.dir.trial(number).rank_log(attempt, 0)
        self.until(lambda: log.exists() and text in log.read_text(), f"{text!r} of trial {number}")
        return log.read_text()

    @property
    def log(self) -> str:
        logs = [self.worker.slurm_log, *(self.dir.trial(number).slurm_log for number in self.dir.trial_numbers())]
        return "\n".join(f"--- {log}\n{log.read_text()}" for log in logs if log.exists())

    def ends(self, number: int) -> list[tuple[str, str]]:
        lines = [line for line, _ in read_lines(self.dir.trial(number).ledger) if line["event"] == "end"]
        return [(line["reason"], line["decision"]) for line in lines]

    @property
    def account(self) -> list[dict[str, Any]]:
        return [line for line, _ in read_lines(self.worker.account)]

    @property
    def worker_ends(self) -> list[tuple[str, str]]:
        return [(line["reason"], line["decision"]) for line in self.account if line["event"] == "end"]

    @property
    def heard(self) -> list[dict[str, Any]]:
        """The messages that the chooser received."""
        path = self.dir.path / "heard-0.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def pid_in(text: str) -> int:
    """The process ID that a program printed after ``ready``."""
    return int(text.split()[1])


def is_gone(pid: int) -> bool:
    return process_start(pid) is None


__all__ = ["CONTINUES", "IN_TURN", "STOPS_AND_GOES_ON", "Sweep", "is_gone", "pid_in"]
