"""One run on a real Slurm, driven by the command line and by jobs of others."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from hpcaccel import checkpoint_files
from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.run_dir import RunDir

from .dev_cluster import Cluster, wait_until

PROGRAMS = Path(__file__).parent / "programs"
QUICK_SECONDS = 600


class Scenario:
    """A spec file and its run, on nodes that the test has leased. ``cluster=None`` is the local backend."""

    def __init__(self, cluster: Cluster | None, folder: Path, *, nodes: list[str] | None = None) -> None:
        self.cluster = cluster
        self.nodes = nodes or []
        self.folder = folder
        self.env = dict(cluster.env if cluster else os.environ, XDG_STATE_HOME=str(folder), OMP_NUM_THREADS="1")
        self.env["HPCACCEL_QUEUE_SECONDS"] = "0"  # a test's changes to a job by hand must be visible at once
        self.dir = RunDir(folder)
        self.job_id = ""

    # -- actions ---------------------------------------------------------------------------------------------------

    def cli(self, *words: str, check: bool = True, timeout_seconds: float = 300) -> subprocess.CompletedProcess[str]:
        answer = subprocess.run(
            [sys.executable, "-m", "hpcaccel", *words],
            env=self.env, cwd=self.folder, capture_output=True, text=True, check=False,
            timeout=timeout_seconds,
        )  # fmt: skip
        if check and answer.returncode:
            raise RuntimeError(f"hpcaccel {shlex.join(words)} ended with {answer.returncode}:\n{answer.stderr}")
        return answer

    def submit(self, spec: dict[str, Any], *words: str) -> None:
        slurm = {"partition": "gpu", "nodes": 2, "gpus_per_node": 2, "cpus_per_task": 1, "mem": "4G", "time": 10}
        slurm |= spec.pop("slurm", {})
        if self.nodes:
            slurm["nodelist"] = ",".join(self.nodes)
        spec = {"name": "scenario", "environment": {"python": sys.executable}, "slurm": slurm, **spec}
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump(spec))
        local = ["--cluster", "local"] if self.cluster is None else []
        answer = json.loads(self.cli("submit", str(path), "--json", *local, *words).stdout)
        self.dir = RunDir(answer["path"])
        self.job_id = answer["job_id"]

    def train(self, *arguments: str, **sections: Any) -> None:
        """Submit the training program, by default 2 nodes x 2 ranks."""
        runtime = {"deterministic": True, **sections.pop("runtime", {})}
        checkpoint = {"every_steps": 15, **sections.pop("checkpoint", {})}
        entrypoint = {"script": str(PROGRAMS / "train.py"), "args": list(arguments)}
        self.submit({"entrypoint": entrypoint, "runtime": runtime, "checkpoint": checkpoint, **sections})

    def plain(self, *arguments: str, grid: tuple[str, ...] = (), **sections: Any) -> None:
        """Submit the program without torch, by default one rank."""
        entrypoint = {"script": str(PROGRAMS / "plain.py"), "args": list(arguments)}
        slurm = {"nodes": 1, "gpus_per_node": 1, **sections.pop("slurm", {})}
        self.submit({"entrypoint": entrypoint, "slurm": slurm, **sections}, *grid)

    def preempt(self, nodes: list[str] | None = None, *, seconds: int = 1) -> str:
        """Submit a job to ``urgent`` that preempts the nodes for a moment; return its id."""
        assert self.cluster is not None
        nodes = nodes or self.nodes
        return self.cluster.sbatch(
            "--partition=urgent", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--exclusive",
            "--gpus-per-node=2", "--time=1", "--output=/dev/null", f"--wrap=sleep {seconds}",
        )  # fmt: skip

    def scancel(self, *words: str) -> None:
        assert self.cluster is not None
        self.cluster.run("scancel", *words, self.job_id)

    # -- queries ---------------------------------------------------------------------------------------------------

    def wait_for_step(self, step: int, *, attempt: int = 1) -> None:
        def reached() -> bool:
            lines = [line for line, _ in read_lines(self.dir.metrics)]
            return any(line["attempt"] >= attempt and line["step"] >= step for line in lines)

        self._wait(reached, f"step {step} of attempt {attempt}")

    def wait_for_checkpoint(self, *, after: int = 0) -> int:
        """Wait until a checkpoint of a later step than ``after`` is committed; return its step."""

        def newest() -> int:
            found = checkpoint_files.newest(self.dir.checkpoints)
            return found.step if found else 0

        self._wait(lambda: newest() > after, f"a checkpoint after step {after}")
        return newest()

    def wait_for_word(self, word: str, *, attempt: int = 1, rank: int = 0, dir: RunDir | None = None) -> str:
        """Wait until a rank has printed a line that begins with ``word``; return that line."""
        log = (dir or self.dir).rank_log(attempt, rank)
        self._wait(lambda: bool(self._said(log, word)), f"{word!r} from rank {rank} of attempt {attempt}")
        return self._said(log, word)[0]

    def wait_for_ends(self, count: int, *, dir: RunDir | None = None, timeout_seconds: float = 600) -> None:
        self._wait(lambda: len(self.lines("end", dir=dir)) >= count, f"{count} attempts' ends", timeout_seconds)

    def wait_until_over(self, *, timeout_seconds: float = 300) -> int:
        """Wait for the run's end or pause; return its exit code."""
        answer = self.cli("wait", self.dir.run_id, check=False, timeout_seconds=timeout_seconds)
        if answer.returncode not in (0, 1, 85, 130):
            raise RuntimeError(f"hpcaccel wait ended with {answer.returncode}:\n{answer.stdout}{answer.stderr}")
        return answer.returncode

    def status(self, dir: RunDir | None = None) -> dict[str, Any]:
        value = json.loads(self.cli("status", (dir or self.dir).run_id, "--json").stdout)
        assert isinstance(value, dict)
        return value

    def job(self, job_id: str = "") -> dict[str, str]:
        """Slurm's fields of a job, by default this run's."""
        assert self.cluster is not None
        return self.cluster.job(job_id or self.job_id)

    def lines(self, event: str, *, dir: RunDir | None = None) -> list[dict[str, Any]]:
        return [line for line, _ in read_lines((dir or self.dir).ledger) if line["event"] == event]

    @property
    def step(self) -> str:
        """The Slurm step of the newest attempt's ranks, once rank 0 has started."""
        attempt = self.lines("start")[-1]["attempt"]
        value = json.loads((self.dir.attempt(attempt) / "step.json").read_text())
        return f"{value['job_id']}.{value['step_id']}"

    @property
    def ends(self) -> list[tuple[str, str]]:
        return [(line["reason"], line["decision"]) for line in self.lines("end")]

    @property
    def losses(self) -> dict[int, float]:
        """Loss of every step; for a repeated step, that of the newest attempt."""
        lines = [line for line, _ in read_lines(self.dir.metrics)]
        return {line["step"]: line["values"]["loss"] for line in lines if "loss" in line["values"]}

    @property
    def digest(self) -> str:
        """Digest of the final weights, printed by the last attempt."""
        attempt = self.lines("start")[-1]["attempt"]
        said = self._said(self.dir.rank_log(attempt, 0), "digest")
        assert said, self.story
        return said[0]

    @property
    def story(self) -> str:
        """All logs, for a test that failed."""
        files = [self.dir.slurm_log, self.dir.ledger, *sorted(self.dir.attempts.glob("*/*.log"))]
        return "\n".join(f"== {file}\n{file.read_text(errors='replace')[-4000:]}" for file in files if file.exists())

    @staticmethod
    def _said(log: Path, word: str) -> list[str]:
        if not log.exists():
            return []
        return [line for line in log.read_text(errors="replace").splitlines() if line.startswith(word)]

    def _wait(self, condition: Any, what: str, timeout_seconds: float = QUICK_SECONDS) -> None:
        try:
            wait_until(condition, what, timeout_seconds=timeout_seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.story}") from None


def settled(seconds: float) -> None:
    """Wait for as long as Slurm would need to start a requeued job."""
    time.sleep(seconds)
