"""Workers of a sweep on a real Slurm, with a small script as chooser and a program without torch as trial."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import read_json, read_lines, write_json
from hpcaccel.core.process_identity import process_start
from hpcaccel.core.sweep_dir import SweepDir

from .dev_cluster import Cluster, wait_until

Lease = Callable[[int], list[str]]
ROOT = Path(__file__).parents[2]

COUNTS = (Path(__file__).parent / "programs" / "counts.py").read_text()
"""Counts until it is stopped; started again, it counts five more steps."""

CHOOSER = (Path(__file__).parent / "programs" / "trial_source.py").read_text()


class Workers:
    def __init__(
        self, cluster: Cluster, folder: Path, *, trials: int, pack: int = 1, stop: str = "cooperative"
    ) -> None:
        self.cluster = cluster
        self.dir = SweepDir(folder / "sweep")
        self.dir.create()
        for name, text in (("program.py", COUNTS), ("chooser.py", CHOOSER)):
            (self.dir.path / name).write_text(text)
        resilience = {
            "requeue": True, "warning_seconds": 60, "stop_timeout_seconds": 20, "max_failures": 3,
            "max_preemptions": None, "restart_in_place": 2,
        }  # fmt: skip
        launch = {
            "kind": "program", "program": [sys.executable, str(self.dir.path / "program.py")], "python": sys.executable,
            "pythonpath": [], "workdir": str(folder), "backend": "slurm", "nodes": 1, "ranks_per_node": 1,
            "stop": stop, "srun": [], "setup_per_node": [],
        }  # fmt: skip
        document: dict[str, Any] = {"version": 1, "spec": {"resilience": resilience}, "launch": launch}
        chooser = [sys.executable, str(self.dir.path / "chooser.py")]
        write_json(self.dir.spec, {**document, "sweep": {"pack": pack}, "chooser": chooser})
        for number in range(trials):
            trial = self.dir.trial(number)
            trial.create()
            write_json(trial.spec, document)
        self.dir.node_program.write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom hpcaccel.node.__main__ import main\nmain()\n"
        )
        command = shlex.join([sys.executable, str(self.dir.node_program), "batch", "work", str(self.dir.path)])
        self.dir.script.write_text(f'#!/bin/bash\nexec {command} "$SLURM_ARRAY_TASK_ID"\n')

    def submit(self, worker: int, *, node: str, partition: str) -> str:
        self.dir.worker(worker).prepare()
        array = self.cluster.sbatch(
            f"--array={worker}", f"--partition={partition}", f"--nodelist={node}", "--nodes=1", "--ntasks-per-node=1",
            "--gpus-per-node=2", "--cpus-per-task=4", "--mem=4G", "--time=10", "--requeue", "--open-mode=append",
            "--signal=B:USR2@60", f"--output={self.dir.worker(worker).slurm_log}", str(self.dir.script),
        )  # fmt: skip
        return f"{array}_{worker}"

    def ends(self, trial: int) -> list[tuple[str, str]]:
        lines = [line for line, _ in read_lines(self.dir.trial(trial).ledger) if line["event"] == "end"]
        return [(line["reason"], line["decision"]) for line in lines]

    def worker_ends(self, worker: int) -> list[tuple[str, str]]:
        lines = [line for line, _ in read_lines(self.dir.worker(worker).account) if line["event"] == "end"]
        return [(line["reason"], line["decision"]) for line in lines]

    def said(self, trial: int, attempt: int) -> list[str]:
        """What a trial's rank has printed when it started: step, process id, GPUs."""
        log = self.dir.trial(trial).rank_log(attempt, 0)
        return log.read_text().split()[1:4] if log.exists() else []

    def wait(self, condition: Callable[[], object], what: str, seconds: float = 90) -> None:
        try:
            wait_until(lambda: bool(condition()), what, timeout_seconds=seconds)
        except TimeoutError as error:
            logs = [*self.dir.path.glob("workers/*/*.log"), *self.dir.path.glob("trials/*/slurm.log")]
            raise TimeoutError(f"{error}\n" + "\n".join(f"--- {log}\n{log.read_text()}" for log in logs)) from None


def test_preempted_workers_continue_their_trials(cluster: Cluster, lease: Lease, tmp_path: Path) -> None:
    nodes = dict(zip(("gpu", "gpu0"), lease(2), strict=True))  # with grace time, and without
    sweep = Workers(cluster, tmp_path, trials=2)
    jobs = [sweep.submit(at, node=node, partition=name) for at, (name, node) in enumerate(nodes.items())]
    for trial in (0, 1):
        sweep.wait(lambda trial=trial: sweep.said(trial, 1), f"trial {trial} runs")  # type: ignore[misc]
    cluster.sbatch(
        "--partition=urgent", "--nodes=2", f"--nodelist={','.join(nodes.values())}", "--exclusive", "--time=1",
        "--gpus-per-node=2", "--output=/dev/null", "--wrap=sleep 1",
    )  # fmt: skip
    for at, job in enumerate(jobs):
        sweep.wait(lambda at=at: len(sweep.worker_ends(at)) == 2, f"worker {at} has ended")  # type: ignore[misc]
        assert sweep.worker_ends(at) == [("preempted", "requeue"), ("completed", "end")]
        assert sweep.ends(at) == [("preempted", "requeue"), ("completed", "end")]
        saved = sweep.said(at, 2)[0]
        assert int(saved) > 0
        assert read_json(sweep.dir.trial(at).outcome(1)) == {
            "version": 1, "reason": "stop", "step": int(saved), "resume": True
        }  # fmt: skip
        assert cluster.wait_for(job, ["COMPLETED"])["Restarts"] == "1"


LEAVES_WITH_0 = """
import os, signal, sys, time
print("starting", 0, os.getpid(), flush=True)
if os.environ["HPCACCEL_ATTEMPT"] == "1":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(300)
"""


def test_preempted_trial_that_exits_with_0_is_continued(cluster: Cluster, lease: Lease, tmp_path: Path) -> None:
    """A preemption with grace time sends its supervisor no signal: it reads slurmstepd's line in the rank's log."""
    (node,) = lease(1)
    sweep = Workers(cluster, tmp_path, trials=1, stop="signals")
    (sweep.dir.path / "program.py").write_text(LEAVES_WITH_0)
    sweep.submit(0, node=node, partition="gpu")
    sweep.wait(lambda: sweep.said(0, 1), "the trial runs")
    cluster.sbatch(
        "--partition=urgent", f"--nodelist={node}", "--exclusive", "--time=1", "--gpus-per-node=2",
        "--output=/dev/null", "--wrap=sleep 1",
    )  # fmt: skip
    sweep.wait(lambda: len(sweep.worker_ends(0)) == 2, "the worker has ended", 180)
    assert sweep.ends(0) == [("preempted", "requeue"), ("completed", "end")]


def test_trials_of_a_cancelled_worker_can_be_continued(cluster: Cluster, lease: Lease, tmp_path: Path) -> None:
    (node,) = lease(1)
    sweep = Workers(cluster, tmp_path, trials=2, pack=2)
    job = sweep.submit(0, node=node, partition="gpu")
    sweep.wait(lambda: sweep.said(0, 1) and sweep.said(1, 1), "both trials run")
    assert {sweep.said(trial, 1)[2] for trial in (0, 1)} == {"0", "1"}  # a GPU each
    cluster.run("scancel", job)
    sweep.wait(lambda: sweep.worker_ends(0), "the worker has ended")
    assert sweep.worker_ends(0) == [("cancelled", "end")]
    assert [sweep.ends(trial) for trial in (0, 1)] == [[("cancelled", "requeue")]] * 2
    cluster.wait_for(job, ["CANCELLED"])
    sweep.submit(0, node=node, partition="gpu")  # another worker continues
    sweep.wait(lambda: len(sweep.worker_ends(0)) == 2, "the other worker has ended")
    assert [sweep.ends(trial)[1:] for trial in (0, 1)] == [[("completed", "end")]] * 2


@pytest.mark.chaos
def test_killed_host_is_restarted_in_the_same_job(cluster: Cluster, lease: Lease, tmp_path: Path) -> None:
    (node,) = lease(1)
    sweep = Workers(cluster, tmp_path, trials=1)
    job = sweep.submit(0, node=node, partition="gpu")
    sweep.wait(lambda: sweep.said(0, 1), "the trial runs")
    (sweep.dir.trial(0).path / "state").write_text("1")
    os.kill((read_json(sweep.dir.worker(0).lease) or {})["pid"], signal.SIGKILL)
    sweep.wait(lambda: sweep.worker_ends(0), "the worker has ended")
    assert process_start(int(sweep.said(0, 1)[1])) is None
    assert sweep.ends(0) == [("lost", "requeue"), ("completed", "end")]
    assert sweep.worker_ends(0) == [("completed", "end")]
    assert cluster.wait_for(job, ["COMPLETED"])["Restarts"] == "0"
    starts = [line for line, _ in read_lines(sweep.dir.worker(0).account) if line["event"] == "start"]
    assert len({(line["job_id"], line["restart_count"], line["allocated_at"]) for line in starts}) == 1
    assert len(starts) == 2


@pytest.mark.parametrize("victim", ["batch step", "trial"])
def test_rank_ends_if_its_batch_step_or_supervisor_is_killed(
    cluster: Cluster, lease: Lease, tmp_path: Path, victim: str
) -> None:
    (node,) = lease(1)
    sweep = Workers(cluster, tmp_path, trials=1)
    job = sweep.submit(0, node=node, partition="gpu")
    sweep.wait(lambda: sweep.said(0, 1), "the trial runs")
    if victim == "batch step":
        cluster.run("scancel", "--batch", "--signal=KILL", job)
    else:
        os.kill((read_json(sweep.dir.trial(0).lease) or {})["pid"], signal.SIGKILL)
    rank = int(sweep.said(0, 1)[1])
    sweep.wait(lambda: process_start(rank) is None, "the rank is gone", 30)
    if victim == "batch step":
        cluster.wait_for(job, ["FAILED"])
        sweep.submit(0, node=node, partition="gpu")
    (sweep.dir.trial(0).path / "state").write_text("1")
    if victim == "trial":
        sweep.wait(
            lambda: not sweep.dir.trial(0).lease.exists() or "without reporting a result" in _log(sweep), "it is told"
        )
        cluster.run("scancel", job)
        return
    sweep.wait(lambda: sweep.worker_ends(0), "the worker has ended")
    assert sweep.ends(0) == [("lost", "requeue"), ("completed", "end")]


MANY = """
import json, sys
print_ = lambda **message: print(json.dumps(message), flush=True)
json.loads(sys.stdin.readline())
for number in range(6):
    print_(run=number, slot=0)
    while (event := json.loads(sys.stdin.readline()))["event"] != "ended":
        pass
print_(end=True, why="all have ended")
"""


def test_host_queries_slurm_once_for_all_its_trials(cluster: Cluster, lease: Lease, tmp_path: Path) -> None:
    (node,) = lease(1)
    sweep = Workers(cluster, tmp_path, trials=6)
    (sweep.dir.path / "program.py").write_text("print('done')\n")
    (sweep.dir.path / "chooser.py").write_text(MANY)
    asked = tmp_path / "asked"
    asked.touch()
    (tmp_path / "bin").mkdir()
    counting = tmp_path / "bin" / "scontrol"
    real = shutil.which("scontrol", path=cluster.env["PATH"])
    counting.write_text(f'#!/bin/bash\necho "$*" >> {asked}\nexec {real} "$@"\n')
    counting.chmod(0o755)
    script = sweep.dir.script.read_text()
    sweep.dir.script.write_text(script.replace("exec ", f'export PATH={tmp_path / "bin"}:"$PATH"\nexec ', 1))
    sweep.submit(0, node=node, partition="gpu")
    sweep.wait(lambda: sweep.worker_ends(0), "the worker has ended", 180)
    assert [sweep.ends(trial) for trial in range(6)] == [[("completed", "end")]] * 6
    starts = [line for line, _ in read_lines(sweep.dir.trial(5).ledger) if line["event"] == "start"]
    assert starts[0]["allocated_at"] is not None
    questions = [line for line in asked.read_text().splitlines() if "show" in line]
    assert 1 <= len([line for line in questions if "job" in line]) <= 3, questions  # one, and one per minute
    assert len(questions) <= 4, questions


def _log(sweep: Workers) -> str:
    return sweep.dir.worker(0).host_log.read_text()
