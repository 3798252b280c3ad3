"""Measurements of what grows with ranks, runs and trials outside of the training: heartbeats, run index, journal."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["attempt_entries", "heartbeat_seconds", "index_seconds", "journal_costs", "lock_seconds"]

TURNS = 5


def _fastest(call: Callable[[], object]) -> float:
    found = []
    for _ in range(TURNS):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return min(found)


def _attempt_of(ranks: int, folder: Path) -> tuple[int, float]:
    """Largest number of entries in one folder of an attempt, and seconds to read all heartbeats."""
    from hpcaccel.core.durable_files import write_json
    from hpcaccel.core.rank_records import Beat
    from hpcaccel.core.records import to_dict
    from hpcaccel.core.run_dir import RunDir
    from hpcaccel.node.failures.heartbeats import Heartbeats

    run = RunDir(folder / "name" / "20260101-000000-0000")
    run.create()
    run.heartbeats(1).mkdir(parents=True)
    beat = Beat(rank=0, host="node", pid=1, number=1, time=time.time(), interval_seconds=10.0, phase="training", step=1)
    for rank in range(ranks):
        run.rank_log(1, rank).write_text("")
        write_json(run.heartbeats(1) / f"{rank}.json", {**to_dict(beat), "rank": rank}, sync=False)
    entries = max(len(os.listdir(run.attempt(1))), len(os.listdir(run.heartbeats(1))))
    return entries, _fastest(lambda: Heartbeats(run, 1).look(expected_seconds=1.0))


def attempt_entries(ranks: int) -> int:
    """Entries of the largest folder of an attempt with ``ranks`` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        return _attempt_of(ranks, Path(folder))[0]


def heartbeat_seconds(ranks: int) -> float:
    """Seconds in which the supervisor reads the heartbeats of ``ranks`` ranks once."""
    with tempfile.TemporaryDirectory() as folder:
        return _attempt_of(ranks, Path(folder))[1]


def index_seconds(runs: int) -> float:
    """Seconds to read an index of ``runs`` runs, which each command that searches for a run reads."""
    from hpcaccel.core.durable_files import append_line
    from hpcaccel.core.registered_runs import index_lines

    before = os.environ.get("XDG_STATE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        try:
            path = Path(folder) / "hpcaccel" / "runs.jsonl"
            path.parent.mkdir()
            line = {"run_id": "20260101-000000-0000", "name": "gpt", "job_id": "1", "path": "/scratch/user/runs/gpt/x"}
            append_line(path, line)
            path.write_bytes(path.read_bytes() * runs)
            return _fastest(index_lines)
        finally:
            if before is None:
                del os.environ["XDG_STATE_HOME"]
            else:
                os.environ["XDG_STATE_HOME"] = before


def journal_costs(trials: int) -> tuple[int, float]:
    """Bytes of a sweep's journal after ``trials`` trials, and seconds to read it."""
    from sweeps.reading import write_journal

    from hpcaccel.sweeps.journal_reader import read_study

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        write_journal(path, Path(folder) / "bare.jsonl", trials)
        return path.stat().st_size, _fastest(lambda: read_study(path))


def lock_seconds(trials: int) -> float:
    """Seconds for which one process needs the journal for a trial: ask, two parameters, a report and tell, on a local
    disk, in a study of ``trials`` trials."""
    import optuna
    from optuna.storages import JournalStorage

    from hpcaccel.sweeps.journal import Journal

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        study = optuna.create_study(
            storage=JournalStorage(Journal(str(Path(folder) / "journal.jsonl"))),
            study_name="sweep",
            sampler=optuna.samplers.RandomSampler(seed=0),
        )
        found = []
        for _ in range(trials):
            begun = time.perf_counter()
            trial = study.ask()
            value = trial.suggest_float("args.lr", 1e-4, 1e-1, log=True)
            trial.suggest_categorical("args.depth", [2, 4, 8])
            trial.report(value, 1)
            study.tell(trial, value)
            found.append(time.perf_counter() - begun)
        return min(found[-TURNS:])
