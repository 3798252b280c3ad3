"""``serve --demo``: recorded runs in a temporary folder, to look at the page without a cluster.

The runs have the files of real ones, with curves computed from their steps. One of them is running: its process only
waits, and ends with the service.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import manifest
from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.process_identity import process_start
from hpcaccel.core.rank_records import Beat, Progress, Save, Timing
from hpcaccel.core.records import AttemptEnd, AttemptStart, RunRecord, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.samples import GpuSample, Sample
from hpcaccel.submission.jobs.local import LocalProcess

__all__ = ["demo_runs"]

STEP_SECONDS = 0.5
LOGGED_EVERY = 10
SAVED_EVERY = 1000
TRACEBACK = """\
Traceback (most recent call last):
  File "train.py", line 88, in <module>
    loss = model(batch).loss
  File "model.py", line 41, in forward
    scores = query @ key.transpose(-2, -1)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has 79.10 GiB, of which 1.2 GiB is free.
"""
SPEC = """\
name: {name}
entrypoint:
  script: train.py
  args: {{lr: {lr}, batch_size: 32}}
slurm:
  partition: gpu
  nodes: {nodes}
  gpus_per_node: 4
  time: 04:00:00
checkpoint:
  every_steps: 1000
"""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One attempt: its first and last step, and how it ended (None: it is running)."""

    first: int
    last: int
    reason: Any = None
    decision: Any = "requeue"
    error_class: str | None = None
    detail: str = ""
    advice: str = ""


@contextmanager
def demo_runs() -> Iterator[Path]:
    """A folder of runs, which is the only one that this process knows; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="hpcaccel-demo-") as folder:
        place = Path(folder)
        os.environ.update(XDG_STATE_HOME=str(place / "state"), HPCACCEL_RUNS_DIR=str(place / "runs"))
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            _write_runs(place / "runs", process.pid)
            yield place / "runs"
        finally:
            process.kill()
            process.communicate()


def _write_runs(runs: Path, pid: int) -> None:
    now, out_of_memory = time.time(), "cuda_out_of_memory"
    _run(runs, "gpt-1b", now - 30_000, 1e-4, [
        _Part(first=0, last=5000, reason="preempted", detail="stopped at step 5000, saved step_00005000"),
        _Part(first=5000, last=9400, reason="failed", error_class=out_of_memory, decision="restart",
              detail="rank 3 exited with code 1: CUDA out of memory"),
        _Part(first=9000, last=16_000, reason="completed", decision="end"),
    ])  # fmt: skip
    _run(runs, "gpt-1b", now - 12_000, 3e-3, [
        _Part(first=0, last=3300, reason="failed", decision="end", error_class=out_of_memory,
              detail="rank 3 exited with code 1: CUDA out of memory",
              advice="Reduce the batch size, or use strategy: fsdp with activation_checkpointing"),
    ])  # fmt: skip
    _run(runs, "vit-finetune", now - 8000, 5e-4, [
        _Part(first=0, last=6000, reason="stop", decision="pause", detail="stopped at step 6000, saved step_00006000"),
    ])  # fmt: skip
    running = _run(runs, "gpt-1b", now - 2 * 1000 * STEP_SECONDS * 3.2, 1e-4, [
        _Part(first=0, last=2000, reason="preempted", detail="stopped at step 2000, saved step_00002000"),
        _Part(first=2000, last=6200),
    ])  # fmt: skip
    record = LocalProcess(job_id="local-demo", host=os.uname().nodename, pid=pid, pid_start=process_start(pid) or 0)
    write_json(running.local_process, asdict(record))


def _run(runs: Path, name: str, created: float, lr: float, parts: list[_Part]) -> RunDir:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(created))
    run = RunDir(runs / name / f"{stamp}-{int(created) % 65536:04x}")
    run.create()
    record = RunRecord(
        run_id=run.run_id, name=name, backend="local", cluster="demo", job_ids=["local-demo"], created=created
    )
    write_json(run.record, to_dict(record))
    run.spec_yaml.write_text(SPEC.format(name=name, lr=lr, nodes=2))
    run.script.write_text(f"#!/bin/bash -l\n# hpcaccel job {name}\n#SBATCH --partition=gpu\n#SBATCH --nodes=2\n")
    launch = {
        "kind": "program", "program": ["train.py"], "workdir": "/", "backend": "local", "nodes": 2, "ranks_per_node": 4,
        "stop": "cooperative",
    }  # fmt: skip
    write_json(run.spec, {"version": 1, "spec": {"name": name, "entrypoint": {"args": {"lr": lr}}}, "launch": launch})
    ended = created + 40
    for number, part in enumerate(parts, start=1):
        ended = _attempt(run, number, part, ended + 90, lr)
    return run


def _attempt(run: RunDir, number: int, part: _Part, begun: float, lr: float) -> float:
    """Write an attempt that began at ``begun``. Returns its end."""
    folder = run.attempt(number)
    folder.mkdir(parents=True)
    first_step = begun + 25
    ended = first_step + (part.last - part.first) * STEP_SECONDS
    if part.reason is None:  # now
        begun, first_step, ended = (moment + time.time() - ended for moment in (begun, first_step, ended))
    start = AttemptStart(
        attempt=number, time=begun, job_id="local-demo", nodes=["n1", "n2"], ranks=8, queued_at=begun - 80,
        allocated_at=begun - 5, checkpoint=f"step_{part.first:08d}" if part.first else None,
        checkpoint_step=part.first or None,
    )  # fmt: skip
    append_line(run.ledger, to_dict(start))
    write_json(run.progress(number), to_dict(Progress(resumed_step=part.first, total_steps=16_000, time=first_step)))
    _write_curves(run, number, part, first_step, lr)
    saved = range(part.first + SAVED_EVERY, part.last + 1, SAVED_EVERY)
    for step in saved:
        when = first_step + (step - part.first) * STEP_SECONDS
        save = Save(step=step, reason="due", stall_seconds=0.05, seconds=4.0, bytes=2 << 30, background=True, time=when)
        append_line(run.saves(number), to_dict(save))
        _write_checkpoint(run, step, when)
    timing = Timing(
        process_started=begun + 2, imported=begun + 12, formed=begun + 18, prepared=begun + 20, loaded=first_step - 1,
        first_step_time=first_step, resumed_step=part.first, last_step=part.last, last_step_time=ended,
        step_seconds=STEP_SECONDS, slowest_step_seconds=1.1, saves=len(saved), stall_seconds=0.05 * len(saved),
        save_seconds=4.0, slowest_save_seconds=5.2,
    )  # fmt: skip
    write_json(run.timing(number), to_dict(timing))
    _write_logs(run, number, part)
    _write_samples(run, number, part, first_step, ended)
    if part.reason is None:
        _write_beats(run, number, part.last, ended)
        return ended
    end = AttemptEnd(
        attempt=number, time=ended, job_id="local-demo", reason=part.reason, decision=part.decision,
        seconds=ended - begun, error_class=part.error_class, detail=part.detail, advice=part.advice,
        exit_code=1 if part.error_class else 0,
        resumed_step=part.first, first_logged=part.first + 1, last_step=part.last,
        checkpoint=f"step_{saved[-1]:08d}", checkpoint_step=saved[-1],
    )  # fmt: skip
    append_line(run.ledger, to_dict(end))
    return ended


def _write_curves(run: RunDir, number: int, part: _Part, first_step: float, lr: float) -> None:
    lines = []
    for step in range(part.first + LOGGED_EVERY, part.last + 1, LOGGED_EVERY):
        noise = math.sin(step * 12.9898 + lr * 1e5) * 0.06
        loss = 1.9 + 8.5 * math.exp(-step / 1500) + 1.2 * math.exp(-step / 9000) + noise
        values = {"loss": round(loss, 4), "lr": lr * min(1, step / 500), "tokens_per_second": 131_000 + 9000 * noise}
        when = first_step + (step - part.first) * STEP_SECONDS
        lines.append(json.dumps({"step": step, "attempt": number, "time": when, "epoch": 0, "values": values}))
    with run.metrics.open("a") as file:
        file.write("\n".join(lines) + "\n")


def _write_checkpoint(run: RunDir, step: int, when: float) -> None:
    path = run.checkpoints / f"step_{step:08d}"
    if path.exists():
        return
    path.mkdir()
    (path / "rank_0.bin").write_bytes(b"demo")
    body = {"version": 1, "step": step, "time": when, "files": {"rank_0.bin": {"bytes": 4}}, "bytes": 4}
    (path / checkpoint_files.MANIFEST).write_bytes(manifest.seal(body))


def _write_logs(run: RunDir, number: int, part: _Part) -> None:
    for rank in range(8):
        begin = f"hpcaccel: starting at step {part.first}\n"
        steps = "".join(f"step {step}\n" for step in range(part.first + 500, part.last + 1, 500) if rank == 0)
        trace = TRACEBACK if part.error_class and rank == 3 else ""
        run.rank_log(number, rank).write_text(begin + steps + trace)


def _write_samples(run: RunDir, number: int, part: _Part, begun: float, ended: float) -> None:
    """One line each 60 s. GPU 3 of node n2 is idle."""
    run.samples(number).mkdir()
    for node in ("n1", "n2"):
        for minute in range(1, int((ended - begun) // 60) + 1):
            gpus = [_gpu(node, index, minute, idle=(node, index) == ("n2", 3)) for index in range(4)]
            sample = Sample(
                time=begun + 60 * minute, seconds=60, source="cgroup2", cpu_seconds=60.0 * minute * 9, cpus=32,
                memory_bytes=22 << 30, memory_limit=256 << 30, io_read_bytes=minute << 28, io_write_bytes=minute << 20,
                step=part.first + int(60 * minute / STEP_SECONDS), gpus=gpus,
            )  # fmt: skip
            append_line(run.samples(number) / f"{node}.jsonl", asdict(sample))


def _gpu(node: str, index: int, minute: int, *, idle: bool) -> GpuSample:
    busy = 0.0 if idle else 88 + 4 * math.sin(minute + index)
    watts = 90.0 if idle else 610.0
    return GpuSample(
        uuid=f"GPU-{node}{index:02d}0000-demo", name="NVIDIA H100 80GB HBM3", utilization=busy,
        memory_used=(2 << 30) if idle else (61 << 30), memory_total=80 << 30, power_watts=watts,
        energy_mj=int(watts * 60_000 * minute), idle_seconds=60.0 if idle else 0.0,
        ranks=[index + (4 if node == "n2" else 0)],
    )  # fmt: skip


def _write_beats(run: RunDir, number: int, step: int, now: float) -> None:
    run.heartbeats(number).mkdir()
    for rank in range(8):
        beat = Beat(
            rank=rank, host="n1" if rank < 4 else "n2", pid=1000 + rank, number=300, time=now, interval_seconds=10.0,
            phase="training", step=step, step_seconds=STEP_SECONDS * (1.4 if rank == 6 else 1.0), site="train.py:88",
        )  # fmt: skip
        write_json(run.heartbeats(number) / f"{rank}.json", to_dict(beat))
    slow = {"time": now, "slow": [{"rank": 6, "node": "n2", "ratio": 1.4}]}
    append_line(run.stragglers(number), slow)
