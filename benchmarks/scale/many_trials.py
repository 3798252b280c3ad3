"""A simulated sweep of many workers on one journal, and a user with many runs."""

from __future__ import annotations

import random
from dataclasses import dataclass

from scale.cost_term import CostTerm
from scale.event_clock import EventClock, QueueServer

__all__ = ["SweepLoad", "sweep"]


@dataclass(frozen=True)
class SweepLoad:
    """What a sweep costs beside its trials.

    Args:
        hours: from the first trial to the last.
        journal_busy: share of the time in which a worker writes to the journal.
        waiting_seconds: mean time that a worker waits for the journal per trial.
        journal_bytes: size of the journal at the end.
        status_seconds: time in which `sweep status` reads this journal.
        reading_seconds: CPU time in which one worker has read all other workers' lines, over the whole sweep.
    """

    hours: float
    journal_busy: float
    waiting_seconds: float
    journal_bytes: float
    status_seconds: float
    reading_seconds: float


def sweep(terms: dict[str, CostTerm], *, trials: int, workers: int, trial_seconds: float, seed: int = 0) -> SweepLoad:
    """Simulate a sweep: each worker runs one trial after the other, and writes to the journal between two trials."""
    clock, source = EventClock(), random.Random(seed)
    journal = QueueServer(clock)
    one = terms["journal: one trial of one process"].predict(trials)
    left, waited = trials, 0.0

    def train() -> None:
        clock.after(source.expovariate(1 / trial_seconds), write)

    def write() -> None:
        asked = clock.now

        def written() -> None:
            nonlocal left, waited
            waited += clock.now - asked - one
            left -= 1
            if left >= workers:
                train()

        journal.request(one, written)

    for _ in range(min(workers, trials)):
        train()
    seconds = clock.run()
    reading = terms["journal: reading"].predict(trials)
    return SweepLoad(
        hours=seconds / 3600,
        journal_busy=journal.busy_seconds / seconds,
        waiting_seconds=waited / trials,
        journal_bytes=terms["journal: bytes"].predict(trials),
        status_seconds=reading,
        reading_seconds=reading,
    )
