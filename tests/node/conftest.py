"""Run directories made by hand, with a supervisor started as the batch script starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import read_lines, write_json
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir, new_run_id
from hpcaccel.core.stop_requests import StopRequest

ROOT = Path(__file__).parents[2]

RESILIENCE = {
    "requeue": True,
    "warning_seconds": 120,
    "stop_timeout_seconds": 20,
    "max_failures": 3,
    "max_preemptions": None,
    "restart_in_place": 2,
}


class LocalRun:
    """A run on the local backend whose ranks are small Python programs without torch."""

    def __init__(self, path: Path, program: str, *, ranks: int, launch: dict[str, Any], **resilience: Any) -> None:
        self.dir = RunDir(path)
        self.dir.create()
        script = self.dir.path / "program.py"
        script.write_text(program)
        document = {
            "version": 1,
            "spec": {"resilience": {**RESILIENCE, **resilience}},
            "launch": {
                "kind": "program",
                "program": ["{python}", str(script)],
                "python": sys.executable,
                "pythonpath": [],
                "workdir": str(path),
                "backend": "local",
                "nodes": 1,
                "ranks_per_node": ranks,
                "stop": "cooperative",
                "srun": [],
                "setup_per_node": [],
                **launch,
            },
        }
        write_json(self.dir.spec, document)
        # In production this is a zip. Here it imports the package itself, so that a change needs no build.
        self.dir.node_program.write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom hpcaccel.node.__main__ import main\nmain()\n"
        )
        self.dir.script.write_text(f"exec {sys.executable} {self.dir.node_program} batch supervise {path}\n")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, job_id: str = "local-00000001") -> None:
        with self.dir.slurm_log.open("ab") as log:
            self.process = subprocess.Popen(
                ["bash", str(self.dir.script)],
                env={**os.environ, "HPCACCEL_LOCAL_JOB": job_id},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout: float = 300) -> int:
        assert self.process is not None
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout} s:\n{self.log}")

    def run(self) -> int:
        self.start()
        return self.wait()

    def ask(self, then: str, *, reason: str = "stop", name: str = "stop-1") -> None:
        request = StopRequest(reason=reason, then=then, time=time.time())  # type: ignore[arg-type]
        write_json(self.dir.control / f"{name}.json", to_dict(request))

    def wait_for(self, text: str, *, attempt: int = 1, rank: int = 0, timeout: float = 30) -> None:
        """Wait until a rank has printed ``text``."""
        log, end = self.dir.rank_log(attempt, rank), time.monotonic() + timeout
        while not (log.exists() and text in log.read_text()):
            if time.monotonic() > end:
                pytest.fail(f"rank {rank} of attempt {attempt} never printed {text!r}:\n{self.log}")
            time.sleep(0.02)

    @property
    def log(self) -> str:
        return self.dir.slurm_log.read_text()

    def lines(self, event: str) -> list[dict[str, Any]]:
        return [line for line, _ in read_lines(self.dir.ledger) if line["event"] == event]

    @property
    def ends(self) -> list[tuple[str, str]]:
        return [(line["reason"], line["decision"]) for line in self.lines("end")]


@pytest.fixture
def local_run(tmp_path: Path) -> Iterator[Callable[..., LocalRun]]:
    runs: list[LocalRun] = []

    def make(
        program: str,
        *,
        ranks: int = 1,
        launch: dict[str, Any] | None = None,
        within: Path = tmp_path,
        **resilience: Any,
    ) -> LocalRun:
        run = LocalRun(within / new_run_id(), program, ranks=ranks, launch=launch or {}, **resilience)
        runs.append(run)
        return run

    yield make
    for run in runs:
        if run.process is not None and run.process.poll() is None:
            run.process.kill()
            run.process.wait()


def outcome(*, step: int, resume: bool, reason: str = "stop") -> str:
    """Source line by which a rank 0 without torch writes its outcome."""
    value = json.dumps({"version": 1, "reason": reason, "step": step, "checkpoint": None, "resume": resume})
    return f"open(folder + '/outcome.json', 'w').write({value!r})"
