"""ASHA compared with random search on synthetic learning curves: time to the best value of random search.

``hpcaccel.sweeps.study`` itself chooses the points and prunes the trials, with in-memory storage; only the training
and the clock are simulated. Both searches draw the same points in the same order.

A curve of ``loss`` over R = 64 epochs, for lr in [1e-4, 1] (u: where it is between them, as a logarithm, 0 to 1), width
in [32, 1024] (v, likewise), dropout d in [0, 0.5]:

    loss(e) = floor + (2.3 - floor) · e^(-rate) + noise
    floor   = 0.10 + 0.6·(u - 0.55)² + 0.15·(v - 0.7)² + 0.3·(d - 0.2)² + |N(0, 0.03)|
    rate    = 0.45 + 0.8·u - 0.25·v + 0.15·d, at least 0.2

a power law of the epoch e. Large learning rates are quick and end higher, wide nets are slow and end lower: curves
cross. The noise is N(0, 0.01) at each epoch; above u = 0.92 the loss stays at 2.3. An epoch takes 0.5 + v.

The constants were fixed before the first run and have not been changed since. The search sees the noisy values, and
selects the trial with the lowest loss; the comparison uses that point's loss without noise, which is what a user would
get. (The minimum of a thousand noisy values is more biased than that of a hundred.)
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from optuna.storages import InMemoryStorage

from hpcaccel.spec.sweep.sweep_fields import SweepSpec
from hpcaccel.spec.sweep.sweep_file import sweep_from_values
from hpcaccel.sweeps.study import AskedTrial, SweepStudy

EPOCHS = 64
WORKERS = (8, 16, 64)
SEEDS = 11
TRIALS_A_WORKER = 16
"""Number of trials of average length that random search does per worker."""
LIMIT = 0.25
GIVE_UP = 0.5
"""Maximum time of ASHA, as a share of the time of random search."""


@dataclass(frozen=True)
class Found:
    """A trial that ran to its end."""

    time: float
    value: float
    """Value without noise of the best trial so far."""
    begun: int
    """Number of trials started until then."""


def main() -> bool:
    print(f"{'ASHA until random search’s best value, medians of ' + str(SEEDS) + ' seeds':58}", end="")
    print(f"{'share of its time':>20}{'min–max':>16}{'limit':>8}")
    rows = [_row(workers) for workers in WORKERS]
    return all(rows)


def _row(workers: int) -> bool:
    begin = time.perf_counter()
    compared = [_share(workers, seed) for seed in range(SEEDS)]
    shares = [share for share, *_ in compared]
    share, value, theirs, ours = (statistics.median(column) for column in zip(*compared, strict=True))
    within = bool(share <= LIMIT)
    what = f"{workers} workers: {value:.3f}, {theirs:.0f} trials of random, {ours:.0f} of ASHA"
    spread = f"{min(shares):.3f}–{max(shares):.3f}"
    verdict = "" if within else "  too late"
    took = time.perf_counter() - begin
    print(f"{what:58}{share:20.3f}{spread:>16}{LIMIT:8.2f}{verdict}  ({took:.0f} s)", flush=True)
    return within


def _share(workers: int, seed: int) -> tuple[float, float, int, int]:
    """Of random's time, its best value, and how many trials each of them had begun."""
    limit = TRIALS_A_WORKER * EPOCHS * 1.0
    *_, last = _search("none", workers, seed, limit)
    best = last.value
    for found in _search("asha", workers, seed, GIVE_UP * limit):
        if found.value <= best:
            return found.time / limit, best, last.begun, found.begun
    return math.inf, best, last.begun, found.begun


def _search(pruner: str, workers: int, seed: int, limit: float) -> Iterator[Found]:
    """The best trial so far, whenever one has run to its end, in the order of the clock, up to ``limit``."""
    study = SweepStudy(_spec(pruner, seed), InMemoryStorage())
    order = itertools.count()
    begun, best = 0, (math.inf, math.inf)
    waiting: list[tuple[float, int, _Training | None]] = [(0.0, next(order), None) for _ in range(workers)]
    while waiting:
        now, _, training = heapq.heappop(waiting)
        if now > limit:
            return
        if training is not None and training.epoch == EPOCHS:
            study.complete(training.number, [training.loss()])
            best = min(best, (training.loss(), training.clean()))
            yield Found(now, best[1], begun)
            training = None
        elif training is not None and _ends(study, training):
            study.prune(training.number)
            training = None
        if training is None:
            asked = study.ask()
            assert isinstance(asked, AskedTrial)
            training, begun = _Training(asked, seed), begun + 1
        training.epoch += 1
        heapq.heappush(waiting, (now + training.epoch_time, next(order), training))


def _ends(study: SweepStudy, training: _Training) -> bool:
    wanted = study.wants(training.number, training.epoch)
    return wanted and bool(study.report(training.number, training.epoch, training.loss()))


class _Training:
    def __init__(self, asked: AskedTrial, seed: int) -> None:
        self.number = asked.number
        self.epoch = 0
        point: dict[str, Any] = asked.point
        source = random.Random(f"{seed} {sorted(point.items())}")
        u = math.log(point["args.lr"] / 1e-4) / math.log(1e4)
        v = math.log(point["args.width"] / 32) / math.log(32)
        d = point["args.dropout"]
        self.epoch_time = 0.5 + v
        self._diverges = u > 0.92
        self._floor = 0.10 + 0.6 * (u - 0.55) ** 2 + 0.15 * (v - 0.7) ** 2 + 0.3 * (d - 0.2) ** 2
        self._floor += abs(source.gauss(0, 0.03))
        self._rate = max(0.2, 0.45 + 0.8 * u - 0.25 * v + 0.15 * d)
        self._noise = [source.gauss(0, 0.01) for _ in range(EPOCHS + 1)]

    def loss(self) -> float:
        """At the end of this epoch."""
        return self.clean() + self._noise[self.epoch]

    def clean(self) -> float:
        """The same without the noise."""
        return 2.3 if self._diverges else float(self._floor + (2.3 - self._floor) * self.epoch**-self._rate)


def _spec(pruner: str, seed: int) -> SweepSpec:
    return sweep_from_values(
        {
            "name": "curves",
            "entrypoint": {"command": ["true"]},
            "slurm": {"time": "1:00:00"},
            "sweep": {
                "method": "random",
                "pruner": {"asha": {"max_steps": EPOCHS}} if pruner == "asha" else "none",
                "metric": "loss",
                "max_trials": 1_000_000,
                "seed": seed,
                "parameters": {
                    "args.lr": {"float": [1e-4, 1.0], "log": True},
                    "args.width": {"int": [32, 1024], "log": True},
                    "args.dropout": {"float": [0.0, 0.5]},
                },
            },
        }
    )


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
