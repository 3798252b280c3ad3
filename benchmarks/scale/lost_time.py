"""Simulated training under faults: ETTR, the share of the allocated time that advances the training.

Failure rates at 16,384 GPUs: 466 interruptions in 54 days (The Llama 3 Herd of Models, arXiv:2407.21783, section
3.3.4), and a mean time to failure of 1.8 hours (Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning
Research Clusters, arXiv:2410.21680). The rate grows with the number of GPUs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scale.event_clock import EventClock

__all__ = ["MTTF_HOURS", "PARAMETERS", "SCENARIOS", "Parameter", "Recovery", "ettr"]

GPUS = 16_384
MTTF_HOURS = {"Llama 3, 466 faults in 54 days": 54 * 24 / 466, "MTTF of 1.8 h": 1.8}
"""Mean hours between failures at ``GPUS`` GPUs."""
DAYS = 54
Place = Literal["same", "spare", "fewer", "queue"]
"""Where the ranks start again: on the same nodes, with a spare one, without the lost one, or after a requeue."""


@dataclass(frozen=True)
class Parameter:
    """A number of the simulation, in seconds unless the name says otherwise, and where it comes from."""

    value: float
    origin: str
    """``measured``, ``published``, ``goal`` (not reached or not measured) or ``assumed``."""
    note: str


PARAMETERS = {
    "detection": Parameter(1.0, "measured", "under 1 s from the kill of a rank on the development cluster"),
    "cold start": Parameter(42.0, "measured", "srun, Python, imports: 35 to 50 s on a busy machine of two cores"),
    "warm start": Parameter(1.4, "measured", "fork to first step with a small model, benchmarks/restart.py"),
    "load from files": Parameter(60.0, "assumed", "reading a checkpoint at this size from a parallel file system"),
    "load from memory": Parameter(5.0, "assumed", "reading a snapshot from the node's or a neighbour's memory"),
    "queue": Parameter(900.0, "assumed", "a requeued job waits for a node in place of the lost one"),
    "stall of a save": Parameter(1.0, "assumed", "a background save stops the steps for one copy in memory"),
    "durable after": Parameter(60.0, "assumed", "from the copy to the commit"),
    "snapshot interval": Parameter(60.0, "assumed", "a copy in memory, on a neighbour too"),
    "share of lost nodes": Parameter(0.5, "assumed", "of all faults; the others kill a process on a healthy node"),
    "restart of the whole job": Parameter(30.0, "assumed", "epilog, prolog and start of a new job"),
    "number of nodes": Parameter(2048.0, "published", "of 8 GPUs each"),
    "number of spare nodes": Parameter(16.0, "assumed", "resilience.spare_nodes; a requeue brings used ones back"),
    "smallest number of nodes": Parameter(2028.0, "assumed", "with shrink: slurm.nodes: 2028-2048"),
}


@dataclass(frozen=True)
class Recovery:
    """What a training has: snapshots in memory (with a copy on a neighbour), warm restarts, spare nodes, ``shrink``."""

    snapshots: bool = False
    warm: bool = False
    spare: bool = False
    shrink: bool = False

    def restart_seconds(self, place: Place, values: Mapping[str, float]) -> float:
        """From the fault to the first step, without the repetition of lost steps."""
        seconds = values["detection"]
        seconds += values["load from memory" if self.keeps_snapshot(place) else "load from files"]
        if place == "queue":
            seconds += values["queue"] + values["restart of the whole job"]
        # Other nodes, and another number of ranks, have no warm processes: the ranks start cold.
        return seconds + values["warm start" if self.warm and place == "same" else "cold start"]

    def keeps_snapshot(self, place: Place) -> bool:
        """Whether the snapshots are loaded: a requeued job gets other nodes, whose memory has none."""
        return self.snapshots and place in ("same", "spare", "fewer")


SCENARIOS = {
    "files, cold restart": Recovery(),
    "files, cold restart, spare nodes": Recovery(spare=True),
    "files, warm restart": Recovery(warm=True),
    "files, warm restart, fewer nodes": Recovery(warm=True, shrink=True),
    "files, warm restart, spare nodes": Recovery(warm=True, spare=True),
    "snapshots, cold restart": Recovery(snapshots=True),
    "snapshots, cold restart, spare nodes": Recovery(snapshots=True, spare=True),
    "snapshots, warm restart": Recovery(snapshots=True, warm=True),
    "snapshots, warm restart, fewer nodes": Recovery(snapshots=True, warm=True, shrink=True),
    "snapshots, warm restart, spare nodes": Recovery(snapshots=True, warm=True, spare=True),
}


def ettr(
    recovery: Recovery,
    *,
    interval_seconds: float,
    mttf_hours: float,
    gpus: int = GPUS,
    days: float = DAYS,
    seed: int = 0,
    values: Mapping[str, float] | None = None,
    gaps: Sequence[float] | None = None,
) -> float:
    """Simulate ``days`` days. Returns useful time / all time; on fewer nodes, time counts in proportion.

    Args:
        interval_seconds: time of training between two saves to files.
        mttf_hours: mean time between failures at ``GPUS`` GPUs.
        values: replace those of ``PARAMETERS``.
        gaps: times from a start to the next fault, in place of random ones. No fault follows the last one.
    """
    known = {**{name: parameter.value for name, parameter in PARAMETERS.items()}, **(values or {})}
    source = random.Random(seed)
    mttf = mttf_hours * 3600 * GPUS / gpus
    faults = iter(lambda: source.expovariate(1 / mttf), None) if gaps is None else iter([*gaps, math.inf])
    return _Training(recovery, interval_seconds, known, source, faults).run(days * 86400.0)


class _Training:
    """One training as events: a save becomes due, a save becomes durable, a fault, the end of a restart."""

    def __init__(
        self,
        recovery: Recovery,
        interval: float,
        values: Mapping[str, float],
        source: random.Random,
        faults: Iterator[float],
    ) -> None:
        self._recovery, self._interval, self._source, self._faults = recovery, interval, source, faults
        self._clock = EventClock()
        self._value = values
        self._done = 0.0
        """Seconds of useful training, with all nodes."""
        self._durable = 0.0
        """Progress of the newest committed checkpoint."""
        self._since: float | None = None
        """When the present stretch of steps began."""
        self._life = 0
        """Number of faults: events of an earlier life have no effect."""
        self._all_back()

    def _all_back(self) -> None:
        """A requeued job has all nodes."""
        self._nodes, self._spares = self._value["number of nodes"], self._value["number of spare nodes"]

    def run(self, seconds: float) -> float:
        self._train()
        while self._clock.now < seconds and self._clock.step():
            pass
        self._pause()
        return self._done / self._clock.now

    def _train(self) -> None:
        life = self._life
        self._since = self._clock.now
        self._clock.after(next(self._faults), lambda: self._fault(life))
        self._clock.after(self._interval, lambda: self._save(life))

    def _pause(self) -> None:
        if self._since is not None:
            self._done += (self._clock.now - self._since) * self._nodes / self._value["number of nodes"]
            self._since = None

    def _save(self, life: int) -> None:
        if life != self._life:
            return
        self._pause()
        saved = self._done
        stall = self._value["stall of a save"]

        def go_on() -> None:
            if life == self._life:
                self._since = self._clock.now
                self._clock.after(self._interval, lambda: self._save(life))

        def durable() -> None:
            if life == self._life:
                self._durable = max(self._durable, saved)

        self._clock.after(stall, go_on)
        self._clock.after(stall + self._value["durable after"], durable)

    def _fault(self, life: int) -> None:
        if life != self._life:
            return
        self._pause()
        self._life += 1
        place = self._next_place() if self._source.random() < self._value["share of lost nodes"] else "same"
        kept = self._durable
        if self._recovery.keeps_snapshot(place):
            interval = self._value["snapshot interval"]
            kept = max(kept, self._done - self._source.uniform(0, min(interval, self._done)))
        self._done = kept
        self._clock.after(self._recovery.restart_seconds(place, self._value), self._train)

    def _next_place(self) -> Place:
        """Where the training continues without a node."""
        if self._recovery.spare and self._spares > 0:
            self._spares -= 1
            return "spare"
        if self._recovery.shrink and self._nodes > self._value["smallest number of nodes"]:
            self._nodes -= 1
            return "fewer"
        self._all_back()
        return "queue"
