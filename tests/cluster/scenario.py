"""One run on a real Slurm, as a user drives it: through the command line, and through other people's jobs."""

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
    """A spec file and what became of it. Give the nodes that the test has leased; None is the local backend."""

    def __init__(self, cluster: Cluster | None, folder: Path, *, nodes: list[str] | None = None) -> None:
        self.cluster = cluster
        self.nodes = nodes or []
        self.folder = folder
        self.env = dict(cluster.env if cluster else os.environ, XDG_STATE_HOME=str(folder), OMP_NUM_THREADS="1")
        self.env["HPCACCEL_QUEUE_SECONDS"] = "0"  # what a test does to a job by hand is to be seen at once
        self.dir = RunDir(folder)
        self.job_id = ""

    # -- driving ---------------------------------------------------------------------------------------------------

    def cli(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        answer = subprocess.run(
            [sys.executable, "-m", "hpcaccel", *words],
            env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=300, check=False,
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
        """Submit the training program, 2 nodes x 2 ranks unless told otherwise."""
        runtime = {"deterministic": True, **sections.pop("runtime", {})}
        checkpoint = {"every_steps": 15, **sections.pop("checkpoint", {})}
        entrypoint = {"script": str(PROGRAMS / "train.py"), "args": list(arguments)}
        self.submit({"entrypoint": entrypoint, "runtime": runtime, "checkpoint": checkpoint, **sections})

    def plain(self, *arguments: str, grid: tuple[str, ...] = (), **sections: Any) -> None:
        """Submit the program without torch, one rank unless told otherwise."""
        entrypoint = {"script": str(PROGRAMS / "plain.py"), "args": list(arguments)}
        slurm = {"nodes": 1, "gpus_per_node": 1, **sections.pop("slurm", {})}
        self.submit({"entrypoint": entrypoint, "slurm": slurm, **sections}, *grid)

    def preempt(self, nodes: list[str] | None = None, *, seconds: int = 1) -> str:
        """A real job of ``urgent`` takes the nodes away for a moment; its job id."""
        assert self.cluster is not None
        nodes = nodes or self.nodes
        return self.cluster.sbatch(
            "--partition=urgent", f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--exclusive",
            "--gpus-per-node=2", "--time=1", "--output=/dev/null", f"--wrap=sleep {seconds}",
        )  # fmt: skip

    def scancel(self, *words: str) -> None:
        assert self.cluster is not None
        self.cluster.run("scancel", *words, self.job_id)

    # -- looking ---------------------------------------------------------------------------------------------------

    def wait_for_step(self, step: int, *, attempt: int = 1) -> None:
        def reached() -> bool:
            lines = [line for line, _ in read_lines(self.dir.metrics)]
            return any(line["attempt"] >= attempt and line["step"] >= step for line in lines)

        self._wait(reached, f"step {step} of attempt {attempt}")

    def wait_for_checkpoint(self, *, after: int = 0) -> int:
        """Until one of a later step than ``after`` is committed; its step."""

        def newest() -> int:
            found = checkpoint_files.newest(self.dir.checkpoints)
            return found.step if found else 0

        self._wait(lambda: newest() > after, f"a checkpoint after step {after}")
        return newest()

    def wait_for_word(self, word: str, *, attempt: int = 1, rank: int = 0, dir: RunDir | None = None) -> str:
        """Until a rank has printed a line that begins with ``word``; that line."""
        log = (dir or self.dir).rank_log(attempt, rank)
        self._wait(lambda: bool(self._said(log, word)), f"{word!r} from rank {rank} of attempt {attempt}")
        return self._said(log, word)[0]

    def wait_for_ends(self, count: int, *, dir: RunDir | None = None, timeout_seconds: float = 600) -> None:
        self._wait(lambda: len(self.lines("end", dir=dir)) >= count, f"{count} attempts' ends", timeout_seconds)

    def wait_until_over(self) -> int:
        """Until nothing follows by itself; the run's exit code."""
        answer = self.cli("wait", self.dir.run_id, check=False)
        if answer.returncode not in (0, 1, 85, 130):
            raise RuntimeError(f"hpcaccel wait ended with {answer.returncode}:\n{answer.stdout}{answer.stderr}")
        return answer.returncode

    def status(self, dir: RunDir | None = None) -> dict[str, Any]:
        value = json.loads(self.cli("status", (dir or self.dir).run_id, "--json").stdout)
        assert isinstance(value, dict)
        return value

    def job(self, job_id: str = "") -> dict[str, str]:
        """What Slurm says of a job, this run's by default."""
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
        """Every step's loss as rank 0 saw it; the newest attempt's word counts."""
        return {line["step"]: line["values"]["loss"] for line, _ in read_lines(self.dir.metrics)}

    @property
    def digest(self) -> str:
        """What the last attempt printed of the final weights."""
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
    """Give Slurm the time in which it would have brought a job back."""
    time.sleep(seconds)
