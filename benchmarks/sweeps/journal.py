"""64 processes on one journal: trials per second compared with Optuna's backend, and the state after random SIGKILLs.

A process may be killed at any point: while it holds the lock, in the middle of a line, or between writing a line and
noticing it. It records a result in its own file only after ``tell`` has returned; every result in those files must be
in the journal.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend
from optuna.trial import TrialState

from hpcaccel.sweeps.journal import Journal
from hpcaccel.sweeps.journal_reader import read_study

PROCESSES = 64
TURNS, TURN_SECONDS = 3, 5.0
KILLS, KILL_EVERY_SECONDS = 300, 0.05
NAMES = {"RUNNING": "running", "COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "WAITING": "waiting"}

Backend = Callable[[str], BaseJournalBackend]


@dataclass
class Siege:
    """Processes that call ask, report and tell on one journal until they are killed."""

    folder: Path
    backend: Backend
    lives: int = 0
    alive: dict[int, int] = field(default_factory=dict)
    """Process id to number."""

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"

    def open(self, seed: int = 0) -> optuna.Study:
        return optuna.create_study(
            storage=JournalStorage(self.backend(str(self.journal))),
            study_name="sweep",
            sampler=optuna.samplers.RandomSampler(seed=seed),
            load_if_exists=True,
        )

    def start(self) -> None:
        self.lives += 1
        pid = os.fork()
        if pid:
            self.alive[pid] = self.lives
            return
        try:
            self._search(self.lives)
        except BaseException:
            traceback.print_exc()
        os._exit(3)

    def _search(self, number: int) -> None:
        study = self.open(seed=number)
        told = os.open(self.folder / f"told-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        while True:
            trial = study.ask()
            value = trial.suggest_float("args.lr", 1e-4, 1e-1, log=True)
            trial.suggest_categorical("args.depth", [2, 4, 8])
            trial.report(value, 1)
            study.tell(trial, value)
            os.write(told, f"{trial.number} {value!r}\n".encode())

    def kill(self, pid: int) -> bool:
        """Returns False if the process had already ended."""
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        del self.alive[pid]
        return os.WIFSIGNALED(status)

    def told(self) -> list[tuple[int, float]]:
        found = []
        for path in self.folder.glob("told-*"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    number, value = line.split()
                    found.append((int(number), float(value)))
        return found


def main() -> bool:
    _speed()
    return _kills()


def _speed() -> None:
    backends: dict[str, Backend] = {"hpcaccel": Journal, "optuna": JournalFileBackend}
    rates: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(TURNS):
        for name, backend in backends.items():
            rates[name].append(_rate(backend))
    for name, found in rates.items():
        shown = ", ".join(f"{rate:.0f}" for rate in found)
        print(f"{f'{PROCESSES} processes, {name}: trials/s per turn':58}{shown:>20}")


def _rate(backend: Backend) -> float:
    folder = Path(tempfile.mkdtemp(prefix="hpcaccel-bench-"))
    try:
        siege = Siege(folder, backend)
        siege.open()
        begin = time.monotonic()
        for _ in range(PROCESSES):
            siege.start()
        time.sleep(TURN_SECONDS)
        took = time.monotonic() - begin
        for pid in list(siege.alive):
            siege.kill(pid)
        return len(siege.told()) / took
    finally:
        shutil.rmtree(folder)


def _kills() -> bool:
    folder = Path(tempfile.mkdtemp(prefix="hpcaccel-bench-"))
    try:
        siege = Siege(folder, Journal)
        siege.open()
        source = random.Random(1)
        for _ in range(PROCESSES):
            siege.start()
        by_itself = 0
        for _ in range(KILLS):
            time.sleep(source.uniform(0, 2 * KILL_EVERY_SECONDS))
            by_itself += not siege.kill(source.choice(list(siege.alive)))
            siege.start()
        for pid in list(siege.alive):
            by_itself += not siege.kill(pid)
        return _judge(siege, by_itself)
    finally:
        shutil.rmtree(folder)


def _judge(siege: Siege, by_itself: int) -> bool:
    told = siege.told()
    trials = siege.open().get_trials(deepcopy=False)
    lost = sum(trials[number].state != TrialState.COMPLETE or trials[number].value != value for number, value in told)
    twice = len(told) - len({number for number, _ in told})
    figures: dict[str, tuple[Any, Any]] = {
        "processes killed": (KILLS + PROCESSES, None),
        "of these while they held the lock": (len(list(siege.folder.glob("journal.*.jsonl"))), None),
        "trials told": (len(told), None),
        "of these lost or changed": (lost, 0),
        "of these told twice": (twice, 0),
        "processes that ended by themselves": (by_itself, 0),
        "trials that our reading and Optuna's see differently": (_differences(siege, trials), 0),
    }
    for what, (figure, limit) in figures.items():
        shown = "" if limit is None else f"{limit:>10}"
        print(f"{what:58}{figure:>10}{shown}{'' if limit in (None, figure) else '  wrong'}")
    return all(limit in (None, figure) for figure, limit in figures.values()) and bool(told)


def _differences(siege: Siege, trials: list[Any]) -> int:
    ours = read_study(siege.journal).trials
    pairs = zip(ours, trials, strict=False)
    unequal = sum(
        (one.state, one.values, one.params, one.intermediate)
        != (NAMES[other.state.name], other.values, other.params, other.intermediate_values)
        for one, other in pairs
    )
    return unequal + abs(len(ours) - len(trials))


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sys.exit(0 if main() else 1)
