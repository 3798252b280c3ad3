"""Counts of what a sweep's workers do to their journal, and a listing of runs to the runs' folders."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from scale.forked_ranks import in_processes

__all__ = ["runs", "sweep"]

TRIALS = 3
"""Trials of each worker."""


def sweep(workers: int) -> dict[str, float]:
    """What all workers of a sweep do to their journal, per trial: locks that they take, and lines."""
    import optuna
    from optuna.storages import JournalStorage

    from hpcaccel.sweeps.journal import Journal
    from hpcaccel.sweeps.journal_file import JournalFile

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def worker(_: int, folder: str) -> list[int]:
        locks = read = 0
        append, pieces = JournalFile._append, JournalFile.pieces

        def counted_append(self: Any, data: bytes, sync: bool) -> None:
            nonlocal locks
            locks += 1
            append(self, data, sync)

        def counted_pieces(self: Any, offset: int = 0) -> Any:
            nonlocal read
            for behind, data in pieces(self, offset):
                read += len(data)
                yield behind, data

        journal: Any = JournalFile
        journal._append, journal.pieces = counted_append, counted_pieces
        storage = JournalStorage(Journal(str(Path(folder) / "journal.jsonl"), patience_seconds=300.0))
        study = optuna.load_study(study_name="sweep", storage=storage, sampler=optuna.samplers.RandomSampler(seed=0))
        locks = 0
        for _ in range(TRIALS):
            trial = study.ask()
            value = trial.suggest_float("args.lr", 1e-4, 1e-1, log=True)
            trial.suggest_categorical("args.depth", [2, 4, 8])
            trial.report(value, 1)
            study.tell(trial, value)
        return [locks, read]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        optuna.create_study(study_name="sweep", storage=JournalStorage(Journal(str(path))))
        before = len(path.read_bytes().splitlines())
        found = in_processes(workers, lambda rank: worker(rank, folder))
        lines = len(path.read_bytes().splitlines()) - before
    trials = workers * TRIALS
    return {
        "sweep: locks of the journal per trial": sum(locks for locks, _ in found) / trials,
        "sweep: lines of the journal per trial": lines / trials,
    }


def runs(number: int) -> dict[str, float]:
    """Operations on the folders of a user's runs by a command that lists them, once their names are cached, and by a
    command that searches for the latest run of a name."""
    from hpcaccel.core.durable_files import write_json
    from hpcaccel.core.records import RunRecord, to_dict
    from hpcaccel.core.registered_runs import register
    from hpcaccel.core.run_dir import RunDir
    from scale.commit_costs import traced

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"
        place = Path(folder) / "runs"
        for each in range(number):
            run = RunDir(place / "gpt" / f"20260101-{each:06d}-{each:04x}")
            run.create()
            record = RunRecord(run_id=run.run_id, name="gpt", backend="local", cluster="local", created=1.0)
            write_json(run.record, to_dict(record), sync=False)
            register(run, name="gpt", job_id=str(each))
        inside = f"{place}/gpt/"
        for _ in range(2):  # the first one fills the cache
            listed = [call for _, call in traced(["-c", _LISTING, str(place), str(number)]) if inside in call]
        searched = [call for _, call in traced(["-c", _SEARCH, str(place)]) if inside in call]
    return {"runs: operations of a listing": len(listed), "runs: operations of a search by name": len(searched)}


_LISTING = """
import sys
from pathlib import Path
from hpcaccel.submission.runs import run_index
run_index.SETTLING_SECONDS = -60.0  # runs of this moment are cached
from hpcaccel.submission.runs.find import known_runs
assert len(known_runs(Path(sys.argv[1]))) == int(sys.argv[2])
"""
_SEARCH = """
import sys
from pathlib import Path
from hpcaccel.submission.runs.find import find_run
find_run("gpt", runs_dir=Path(sys.argv[1]))
"""
