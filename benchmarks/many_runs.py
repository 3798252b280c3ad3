"""Measure ``list --all`` and ``clean --runs`` with thousands of runs: ``benchmarks/many_runs.py [RUNS]``.

The run directories are generated in a temporary folder: each has a ledger of two attempts, 200 lines of metrics, two
checkpoints without tensors, logs and a copy of some code. Every command runs in a new process, as on a command line;
the first one reads everything, the next ones only what has changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import manifest
from hpcaccel.core.durable_files import write_json
from hpcaccel.core.rank_records import Progress
from hpcaccel.core.records import AttemptEnd, AttemptStart, RunRecord, to_dict
from hpcaccel.core.registered_runs import register
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.runs.run_index import SETTLING_SECONDS

DAY = 86400.0


def make_run(place: Path, number: int) -> None:
    """Create an old, completed run."""
    created = time.time() - 100 * DAY + number
    run = RunDir(place / f"name{number % 50}" / f"20260101-{number:06d}-{number % 65536:04x}")
    run.create()
    name, jobs = f"name{number % 50}", [str(number)]
    record = RunRecord(run_id=run.run_id, name=name, backend="slurm", cluster="alps", job_ids=jobs, created=created)
    write_json(run.record, to_dict(record), sync=False)
    args = {f"a{number}": number for number in range(40)}
    spec = {"name": name, "checkpoint": {"resume": "auto"}, "entrypoint": {"args": args}}
    launch = {
        "kind": "program", "program": ["train"], "workdir": str(place), "backend": "slurm", "nodes": 1,
        "ranks_per_node": 2, "stop": "cooperative",
    }  # fmt: skip
    write_json(run.spec, {"version": 1, "spec": spec, "launch": launch}, sync=False)
    run.code.mkdir()
    for name in ("train.py", "model.py", "data.py", "config.yaml"):
        (run.code / name).write_text("x = 1\n" * 100)
    ledger, lines = [], []  # the ledger is written at once: append_line waits for the disk after each line
    for attempt in (1, 2):
        run.attempt(attempt).mkdir()
        start = AttemptStart(attempt=attempt, time=created + attempt, job_id=str(number), nodes=["n1"], ranks=2)
        ledger.append(to_dict(start))
        progress = Progress(resumed_step=0, resumed_from=None, total_steps=400)
        write_json(run.progress(attempt), to_dict(progress), sync=False)
        for rank in (0, 1, "supervisor"):
            run.rank_log(attempt, rank).write_text("a line\n" * 50)
        end = AttemptEnd(
            attempt=attempt, time=created + attempt + 1, reason="completed" if attempt == 2 else "preempted",
            decision="end" if attempt == 2 else "requeue", last_step=200 * attempt, seconds=100.0,
        )  # fmt: skip
        ledger.append(to_dict(end))
        for step in range(200 * attempt - 199, 200 * attempt + 1, 2):
            values = {"loss": 1 / step}
            lines.append({"step": step, "attempt": attempt, "time": created + step, "epoch": 0, "values": values})
    run.ledger.write_text("".join(json.dumps(line) + "\n" for line in ledger))
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (200, 400):
        make_checkpoint(run.checkpoints / f"step_{step:08d}", step)
    register(run, name=record.name, job_id=str(number))
    for folder, folders, files in os.walk(run.path):
        for name in (*folders, *files):
            os.utime(os.path.join(folder, name), (created, created))


def make_checkpoint(path: Path, step: int) -> None:
    path.mkdir()
    (path / "rank_0.bin").write_bytes(b"x" * 1000)
    files = {"rank_0.bin": {"bytes": 1000}}
    (path / checkpoint_files.MANIFEST).write_bytes(
        manifest.seal({"version": 1, "step": step, "files": files, "bytes": 1000})
    )


def timed(args: list[str], cwd: Path) -> tuple[float, float]:
    """Wall-clock and CPU seconds."""
    begun, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-m", "hpcaccel", *args], cwd=cwd, capture_output=True, check=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - begun, used


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    with tempfile.TemporaryDirectory(prefix="hpcaccel-many-") as folder:
        place = Path(folder)
        os.environ.update(XDG_STATE_HOME=str(place / "state"), XDG_CONFIG_HOME=str(place / "config"), HOME=folder)
        for number in range(count):
            make_run(place / "runs", number)
        time.sleep(SETTLING_SECONDS + 1)
        for args in (["--version"], ["list", "--all"], ["list"], ["clean", "--runs"]):
            first, *others = [timed(args, place) for _ in range(4)]
            (seconds, used), words = min(others), " ".join(args)
            print(f"{count} runs, {words}: first {first[0]:.2f} s; then {seconds:.2f} s, CPU time {used:.2f} s")


if __name__ == "__main__":
    main()
