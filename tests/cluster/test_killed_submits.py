"""Submits that are killed while a real sbatch runs: exactly one job, which hpcaccel knows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission import all_runs

from .dev_cluster import Cluster, wait_until

Lease = Callable[[int], list[str]]

SPEC = """\
name: killed
entrypoint: {{command: [sleep, "30"]}}
slurm: {{partition: gpu, nodes: 1, ntasks_per_node: 1, mem: 1G, time: 5, begin: now+1hour, nodelist: {node}}}
"""
FUNCTION = """\
import hpcaccel, work
slurm = {{"partition": "gpu", "nodes": 1, "ntasks_per_node": 1, "mem": "1G", "time": 5, "nodelist": "{node}"}}
spec = {{"name": "called", "slurm": slurm, "environment": {{"python": {python!r}}}}}
hpcaccel.submit(work.double, 21, spec=spec)
"""
SBATCH = """\
#!/bin/bash
touch {here}/began
sleep {before}
{real} "$@"
code=$?
sleep {behind}
exit $code
"""


class Place:
    """A folder with a spec, and an sbatch that is slow before and after it submits the job."""

    def __init__(self, path: Path, cluster: Cluster, node: str) -> None:
        self.path, self.cluster = path, cluster
        self.env = {**os.environ, **cluster.env, "XDG_STATE_HOME": str(path / "state")}
        self.node = node
        (path / "job.yaml").write_text(SPEC.format(node=node))

    def slow_sbatch(self, *, before: float, behind: float) -> None:
        real = self.cluster.run("bash", "-c", "type -P sbatch").stdout.strip()
        (self.path / "bin").mkdir()
        program = self.path / "bin" / "sbatch"
        program.write_text(SBATCH.format(here=self.path, before=before, behind=behind, real=real))
        program.chmod(0o755)
        self.env["PATH"] = f"{self.path / 'bin'}:{self.env['PATH']}"

    def start(self, *words: str) -> subprocess.Popen[str]:
        words = (sys.executable, *(words or ("-m", "hpcaccel", "submit", "job.yaml", "--no-facts")))
        return subprocess.Popen(
            words, cwd=self.path, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def hpcaccel(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hpcaccel", *words],
            cwd=self.path, env=self.env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    def jobs(self) -> list[str]:
        """Jobs in the queue that belong to runs of this folder."""
        lines = self.cluster.run("squeue", "--noheader", "--format=%F|%o").stdout.splitlines()
        return [line.partition("|")[0] for line in lines if line.partition("|")[2].startswith(str(self.path))]


@pytest.fixture
def place(cluster: Cluster, tmp_path: Path, lease: Lease, monkeypatch: pytest.MonkeyPatch) -> Place:
    place = Place(tmp_path, cluster, lease(1)[0])
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return place


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=["kill", "hup"])
@pytest.mark.parametrize("pauses", [(2.0, 0.0), (0.0, 2.0)], ids=["before sbatch", "behind sbatch"])
def test_killed_submit_leaves_exactly_one_known_job(place: Place, number: int, pauses: tuple[float, float]) -> None:
    place.slow_sbatch(before=pauses[0], behind=pauses[1])
    process = place.start()
    wait_until(lambda: (place.path / "began").exists(), "sbatch is at work")
    process.send_signal(number)
    process.communicate(timeout=60)
    again = place.hpcaccel("submit", "job.yaml", "--no-facts")
    if number == signal.SIGKILL:
        assert "was already submitted by the same command" in again
    assert len(place.jobs()) == 1
    (run,) = all_runs()
    assert run.status().state == "pending"
    assert run.job_id in place.jobs()
    place.hpcaccel("cancel", run.job_id)
    wait_until(lambda: not place.jobs(), "cancelled")


def test_function_of_a_killed_submit_runs_and_returns_its_result(place: Place) -> None:
    """submitit names the pickle by the job's id once it knows it: too late if the submit is killed."""
    place.slow_sbatch(before=0.0, behind=10.0)
    (place.path / "work.py").write_text("def double(value):\n    return 2 * value\n")
    (place.path / "submit.py").write_text(FUNCTION.format(node=place.node, python=sys.executable))
    process = place.start("submit.py")
    wait_until(lambda: place.jobs() or process.poll() is not None, "the job is in the queue")
    assert process.poll() is None, process.communicate()
    process.kill()
    process.communicate(timeout=60)
    (path,) = place.path.glob("runs/*/*")
    wait_until(lambda: ends(path), "its attempt has ended", timeout_seconds=120)
    assert [line["reason"] for line in ends(path)] == ["completed"], (path / "slurm.log").read_text()
    (run,) = all_runs()
    wait_until(lambda: run.status().state == "completed", "sbatch, which holds the lock of the submit, has ended")
    assert run.result() == 42


def ends(path: Path) -> list[dict[str, Any]]:
    ledger = RunDir(path).ledger
    return [line for line, _ in read_lines(ledger) if line["event"] == "end"] if ledger.exists() else []


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=["kill", "hup"])
@pytest.mark.parametrize("moment", [0.1 * step for step in range(1, 31)])
def test_submit_killed_at_any_moment_leaves_exactly_one_job(place: Place, moment: float, number: int) -> None:
    place.slow_sbatch(before=0.2, behind=0.2)
    process = place.start()
    time.sleep(moment)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    if "submitted" not in out:
        place.hpcaccel("submit", "job.yaml", "--no-facts")
    assert len(place.jobs()) == 1
    assert [run.status().state for run in all_runs()] == ["pending"]
    place.hpcaccel("clean", "--older-than", "0m", "--runs", "--yes")
    (run,) = all_runs()
    assert list(place.path.glob("runs/*/.*")) == []
    place.hpcaccel("cancel", run.run_id)
    wait_until(lambda: not place.jobs(), "cancelled")
