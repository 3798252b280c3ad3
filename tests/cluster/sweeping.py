"""A sweep of the small GPT on a real Slurm: faults of its workers, and checks of the result."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.core.durable_files import read_json, read_lines
from hpcaccel.core.process_identity import process_start
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.submission.runs.status import ACTIVE
from hpcaccel.sweeps.journal_file import JournalFile
from hpcaccel.sweeps.journal_reader import STATE_VALUES, STATES, TrialRecord, read_study

from . import injectors
from .dev_cluster import Cluster, wait_until
from .scenario import Scenario

SPEC = Path(__file__).parents[2] / "jobs" / "gpt" / "sweep.yaml"
SMALL = ("args.bytes=100000", "args.context=64", "args.batch=8", "checkpoint.every_steps=5")
"""195 steps an epoch, each of some milliseconds."""
PATIENCE_SECONDS = 300
FINISHED = ("complete", "pruned", "failed")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A trial that has saved in its current attempt, and may be disturbed."""

    worker: int
    trial: int
    attempt: int
    step: int
    """Step of its newest checkpoint."""


class Sweeping:
    """A sweep of ``jobs/gpt`` on leased nodes, started by the command line."""

    def __init__(self, cluster: Cluster, folder: Path, *, nodes: list[str]) -> None:
        self.cluster = cluster
        self.shell = Scenario(cluster, folder, nodes=nodes)
        self.folder = folder
        self.nodes = nodes
        self.dir = SweepDir(folder)
        self.arrays: list[str] = []

    # -- actions ---------------------------------------------------------------------------------------------------

    def start(self, *overrides: str) -> None:
        others = ",".join(node for node in self.cluster.nodes if node not in self.nodes)
        words = [*SMALL, f"environment.python={sys.executable}", "slurm.mem=1G", "slurm.cpus_per_task=1", *overrides]
        words += [f"slurm.exclude={others}"] if others else []
        answer = json.loads(self.cli("start", str(SPEC), *words, "--cluster", "slurm", "--json"))
        self.dir, self.arrays = SweepDir(answer["path"]), answer["job_ids"]

    def cli(self, *words: str) -> str:
        return self.shell.cli("sweep", *words).stdout

    def job(self, worker: int) -> str:
        return f"{self.arrays[0]}_{worker}"

    def cancel(self) -> None:
        """Cancel its remaining jobs, including those in the queue."""
        self.cluster.run("scancel", *self.arrays, check=False)

    # -- queries ---------------------------------------------------------------------------------------------------

    def study(self) -> dict[int, TrialRecord]:
        return {trial.number: trial for trial in read_study(self.dir.journal).trials}

    def finished(self) -> dict[int, tuple[str, list[float] | None]]:
        return {n: (trial.state, trial.values) for n, trial in self.study().items() if trial.state in FINISHED}

    def status(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.cli("status", self.dir.run_id, "--json"))
        return value

    def account(self, worker: int) -> list[dict[str, Any]]:
        return [line for line, _ in read_lines(self.dir.worker(worker).account)]

    def is_leaving(self, worker: int) -> bool:
        """Whether the worker is already stopping (a fault may hit two workers on one node) or its host is dead."""
        if process_start((read_json(self.dir.worker(worker).lease) or {"pid": 0})["pid"]) is None:
            return True
        log = self.dir.worker(worker).host_log
        newest = log.read_text().rpartition(f" worker {worker}, start ")[2] if log.exists() else ""
        return " stopping: " in newest

    def targets(self) -> list[Target]:
        found = []
        for worker in self.dir.worker_indices():
            lines = [] if self.is_leaving(worker) else self.account(worker)
            for trial in lines[-1].get("trials", []) if lines else []:
                starts = ledger(self.dir.trial(trial))
                newest = checkpoint_files.newest(self.dir.trial(trial).checkpoints)
                if not starts or starts[-1]["event"] != "start" or newest is None:
                    continue
                if newest.step > (starts[-1]["checkpoint_step"] or 0) and processes(self.dir.trial(trial)):
                    attempt = starts[-1]["attempt"]
                    found.append(Target(worker=worker, trial=trial, attempt=attempt, step=newest.step))
        return found

    def target(self, worker: int | None = None) -> Target:
        """Wait for targets; return the one with the most steps left."""
        found: list[Target] = []

        def there() -> bool:
            assert self.cluster.run("squeue", "--noheader", f"--jobs={self.arrays[0]}").stdout, "the sweep is over"
            found[:] = [target for target in self.targets() if worker in (None, target.worker)]
            return bool(found)

        self.wait(there, "a trial that trains and has saved")
        return min(found, key=lambda target: target.step)

    def wait(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
        try:
            wait_until(lambda: bool(condition()), what, timeout_seconds=seconds)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.story}") from None

    def wait_until_over(self, seconds: float) -> None:
        self.wait(lambda: self.status()["state"] not in ACTIVE, "the end of the sweep", seconds)
        assert self.status()["state"] == "completed", self.story

    def wait_for_end(self, target: Target) -> None:
        """Wait until the ledger has the end of the attempt or the start of a later one."""

        def ended() -> bool:
            last = ledger(self.dir.trial(target.trial))[-1]
            return bool(last["attempt"] > target.attempt or last["event"] == "end")

        self.wait(ended, f"the end of attempt {target.attempt} of trial {target.trial}")

    @property
    def story(self) -> str:
        files = sorted([*self.dir.path.glob("workers/*/*.log"), *self.dir.path.glob("trials/*/attempts.jsonl")])
        return "\n".join(f"--- {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


def ledger(run: RunDir) -> list[dict[str, Any]]:
    return [line for line, _ in read_lines(run.ledger)]


def processes(run: RunDir) -> list[int]:
    """Process ids of the ranks of a run on this machine."""
    mark, found = f"HPCACCEL_RUN_DIR={run.path}".encode(), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().split(b"\0")
                found += [int(entry.name)] if any(word.endswith(b"/train.py") for word in command) else []
        except OSError:
            continue
    return found


# -- faults --------------------------------------------------------------------------------------------------------


def preempt(sweep: Sweeping, target: Target) -> None:
    """Preempt the trial's worker by an urgent job."""
    sweep.shell.preempt(ledger(sweep.dir.trial(target.trial))[-1]["nodes"])


def preempt_without_grace(sweep: Sweeping, target: Target) -> None:
    """Move the worker to a partition without grace time while it waits in the queue, then preempt it."""
    sweep.cluster.run("scontrol", "requeue", sweep.job(target.worker))
    sweep.wait_for_end(target)
    sweep.cluster.wait_for(sweep.job(target.worker), ["PENDING"])
    sweep.cluster.run("scontrol", "update", f"JobId={sweep.job(target.worker)}", "Partition=gpu0")
    again = sweep.target(target.worker)
    preempt(sweep, again)
    sweep.wait_for_end(again)


def requeue(sweep: Sweeping, target: Target) -> None:
    sweep.cluster.run("scontrol", "requeue", sweep.job(target.worker))


def signal_batch_step(sweep: Sweeping, target: Target) -> None:
    sweep.cluster.run("scancel", "--batch", "--signal=USR2", sweep.job(target.worker))


def terminate(sweep: Sweeping, target: Target) -> None:
    sweep.cluster.run("scancel", "--full", "--signal=TERM", sweep.job(target.worker))


def kill_host(sweep: Sweeping, target: Target) -> None:
    """Kill the host; the batch step starts another one, which continues the same trial."""
    before = _holder(sweep.dir.worker(target.worker))
    os.kill(before, signal.SIGKILL)
    sweep.wait(lambda: _holder(sweep.dir.worker(target.worker)) != before, "another host")


def kill_supervisor(sweep: Sweeping, target: Target) -> None:
    os.kill(_holder(sweep.dir.trial(target.trial)), signal.SIGKILL)


def kill_rank(sweep: Sweeping, target: Target) -> None:
    os.kill(processes(sweep.dir.trial(target.trial))[0], signal.SIGKILL)


def kill_chooser(sweep: Sweeping, target: Target) -> None:
    """Kill the chooser of the target's worker."""
    for pid in injectors.family(_holder(sweep.dir.worker(target.worker))):
        if b"hpcaccel.sweeps.tuner" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            break
    else:
        raise AssertionError("no chooser runs")
    log = sweep.dir.worker(target.worker).host_log
    sweep.wait(lambda: "the tuner died (signal 9)" in log.read_text(), "a new chooser")


def _holder(run: RunDir) -> int:
    return int((read_json(run.lease) or {})["pid"])


FAULTS: dict[str, Callable[[Sweeping, Target], None]] = {
    "preempted": preempt,
    "chooser killed": kill_chooser,
    "rank killed": kill_rank,
    "scontrol requeue": requeue,
    "host killed": kill_host,
    "supervisor killed": kill_supervisor,
    "preempted without grace": preempt_without_grace,
    "scancel --signal=USR2": signal_batch_step,
    "scancel --signal=TERM": terminate,
}


LEAVE_NO_LINE = ("chooser killed",)
"""Faults that do not end an attempt in the trial's ledger."""


def disturb(sweep: Sweeping, names: list[str]) -> None:
    """Inject one fault after the other, each into a trial that trains; finished trials stay finished."""
    kept: dict[int, tuple[str, list[float] | None]] = {}
    for name in names:
        target = sweep.target()
        print(f"{name}: worker {target.worker}, trial {target.trial} behind step {target.step}", flush=True)
        FAULTS[name](sweep, target)
        if name not in LEAVE_NO_LINE:
            sweep.wait_for_end(target)
        now = sweep.finished()
        assert kept.items() <= now.items(), (name, kept, now)
        kept = now


# -- checks --------------------------------------------------------------------------------------------------------


def assert_each_counted_once(sweep: Sweeping, trials: int) -> None:
    """Every trial has ended, in one line of the journal; the commands show the same."""
    study = sweep.study()
    assert sorted(study) == list(range(trials))
    assert {trial.state for trial in study.values()} <= {"complete", "pruned"}, sweep.story
    lines = [json.loads(line) for line, _ in JournalFile(sweep.dir.journal).lines()]
    ends = Counter(line["trial_id"] for line in lines if line.get("op_code") == STATE_VALUES and _ends(line))
    assert ends == dict.fromkeys(range(trials), 1)
    table = {row["trial"]: row for row in json.loads(sweep.cli("table", sweep.dir.run_id, "--json"))}
    for number, trial in study.items():
        row = table[number]
        assert (row["state"], row["loss"]) == (trial.state, trial.values[0] if trial.values else None)
        assert {name: row[name] for name in trial.params} == trial.params
        if trial.state == "complete":
            assert trial.values == [last_loss(sweep.dir.trial(number))]
    counts = Counter(trial.state for trial in study.values())
    assert {state: count for state, count in sweep.status()["trials"].items() if count} == counts


def _ends(line: Mapping[str, Any]) -> bool:
    return STATES[line["state"]] in FINISHED


def last_loss(run: RunDir) -> float:
    lines = [line for line, _ in read_lines(run.metrics)]
    return float(max(lines, key=lambda line: (line["attempt"], line["step"]))["values"]["loss"])


def assert_each_went_on(sweep: Sweeping) -> int:
    """Every interrupted attempt was followed by one from its checkpoint; return how many from a step above 0."""
    count = 0
    for number in sweep.study():
        ends = [line for line in ledger(sweep.dir.trial(number)) if line["event"] == "end"]
        for before, after in itertools.pairwise(ends):
            if after["last_step"] is not None:  # its ranks have loaded
                assert after["resumed_step"] == (before["checkpoint_step"] or 0), (number, ends)
                count += after["resumed_step"] > 0
        assert ends[-1]["decision"] == "end", (number, ends)
    return count


def accounted(sweep: Sweeping) -> list[tuple[str, str, int, int]]:
    """Slurm's accounting of each allocation of each worker, requeued ones included: job, state, seconds, GPUs."""
    columns = "--format=JobID,State,ElapsedRaw,AllocTRES"
    options = ["--noheader", "--parsable2", "--duplicates", "--allocations", columns]
    rows = []
    for line in sweep.cluster.run("sacct", *options, f"--jobs={','.join(sweep.arrays)}").stdout.splitlines():
        job, state, seconds, resources = line.split("|")
        held = dict(word.split("=") for word in resources.split(",") if word)
        # One per worker if the accounting does not record GPUs, like the development cluster's.
        rows.append((job, state, int(seconds), int(held.get("gres/gpu", 1 if held else 0))))
    return rows


def assert_as_accounted(sweep: Sweeping, *, seconds_each: float = 0.0) -> tuple[float, float]:
    """Our GPU-seconds and Slurm's agree within 2 % plus ``seconds_each`` per allocation (Slurm counts whole seconds);
    return both."""

    def over() -> bool:
        listed = sweep.cluster.run("squeue", "--noheader", f"--jobs={','.join(sweep.arrays)}", check=False)
        return not listed.stdout and not any(row[1] in ("RUNNING", "PENDING") for row in accounted(sweep))

    sweep.wait(over, "the end of the sweep in the accounting", 300)
    stays = accounted(sweep)
    theirs = float(sum(seconds * gpus for _, _, seconds, gpus in stays))
    ours = sweep.status()["gpu_hours"] * 3600
    assert abs(ours - theirs) <= 0.02 * theirs + seconds_each * len(stays), (ours, stays, sweep.story)
    return ours, theirs


def assert_best_comes_again(sweep: Sweeping) -> None:
    """The best trial's spec is valid, and a run of it has exactly the same loss."""
    spec = sweep.folder / "best.yaml"
    spec.write_text(sweep.cli("best", sweep.dir.run_id))
    best = json.loads(sweep.cli("best", sweep.dir.run_id, "--json"))
    complete = [trial.values[0] for trial in sweep.study().values() if trial.state == "complete" and trial.values]
    assert best["values"]["loss"] == min(complete)
    sweep.shell.cli("validate", str(spec))
    answer = json.loads(sweep.shell.cli("submit", str(spec), "--cluster", "slurm", "--json").stdout)
    assert sweep.shell.cli("wait", answer["run_id"]).returncode == 0
    assert last_loss(RunDir(answer["path"])) == best["values"]["loss"]
