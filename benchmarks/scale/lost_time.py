"""Simulated training under faults: ETTR, the share of the allocated time that advances the training.

Failure rates at 16,384 GPUs: 466 interruptions in 54 days (The Llama 3 Herd of Models, arXiv:2407.21783, section
3.3.4), and a mean time to failure of 1.8 hours (Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning
Research Clusters, arXiv:2410.21680). The rate grows with the number of GPUs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from scale.event_clock import EventClock

__all__ = ["MTTF_HOURS", "PARAMETERS", "SCENARIOS", "Parameter", "Recovery", "ettr"]

GPUS = 16_384
MTTF_HOURS = {"Llama 3, 466 faults in 54 days": 54 * 24 / 466, "MTTF of 1.8 h": 1.8}
"""Mean hours between failures at ``GPUS`` GPUs."""
DAYS = 54


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
    "warm start": Parameter(2.0, "goal", "a forked process that has imported torch"),
    "load from files": Parameter(60.0, "assumed", "reading a checkpoint at this size from a parallel file system"),
    "load from memory": Parameter(5.0, "goal", "reading a snapshot from the node's or a neighbour's memory"),
    "queue": Parameter(900.0, "assumed", "a requeued job waits for a node in place of the lost one"),
    "stall of a save": Parameter(1.0, "assumed", "a background save stops the steps for one copy in memory"),
    "durable after": Parameter(60.0, "assumed", "from the copy to the commit"),
    "snapshot interval": Parameter(60.0, "goal", "a copy in memory, on a neighbour too"),
    "share of lost nodes": Parameter(0.5, "assumed", "of all faults; the others kill a process on a healthy node"),
    "restart of the whole job": Parameter(30.0, "assumed", "epilog, prolog and start of a new job"),
}


@dataclass(frozen=True)
class Recovery:
    """What a training has: snapshots in memory (with a copy on a neighbour), warm restarts, a spare node."""

    snapshots: bool = False
    warm: bool = False
    spare: bool = False

    def restart_seconds(self, *, node_lost: bool) -> float:
        """From the fault to the first step, without the repetition of lost steps."""
        value = {name: parameter.value for name, parameter in PARAMETERS.items()}
        in_place = not node_lost or self.spare
        seconds = value["detection"] + value["load from memory" if self.snapshots and in_place else "load from files"]
        if not in_place:
            seconds += value["queue"] + value["restart of the whole job"]
        # A spare node has no warm process of this training yet: its rank starts cold, and the others wait for it.
        return seconds + value["warm start" if self.warm and not node_lost else "cold start"]

    def keeps_snapshot(self, *, node_lost: bool) -> bool:
        """Whether the snapshots survive: a requeued job gets other nodes, whose memory has none."""
        return self.snapshots and (not node_lost or self.spare)


SCENARIOS = {
    "files, cold restart": Recovery(),
    "files, warm restart": Recovery(warm=True),
    "files, warm restart, spare node": Recovery(warm=True, spare=True),
    "snapshots, warm restart": Recovery(snapshots=True, warm=True),
    "snapshots, warm restart, spare node": Recovery(snapshots=True, warm=True, spare=True),
}


def ettr(recovery: Recovery, *, interval_seconds: float, mttf_hours: float, gpus: int = GPUS, seed: int = 0) -> float:
    """Simulate ``DAYS`` days. Returns useful time / all time.

    Args:
        interval_seconds: time of training between two saves to files.
        mttf_hours: mean time between failures at ``GPUS`` GPUs.
    """
    training = _Training(recovery, interval_seconds, mttf_hours * 3600 * GPUS / gpus, random.Random(seed))
    return training.run()


class _Training:
    """One training as events: a save becomes due, a save becomes durable, a fault, the end of a restart."""

    def __init__(self, recovery: Recovery, interval: float, mttf: float, source: random.Random) -> None:
        self._recovery, self._interval, self._mttf, self._source = recovery, interval, mttf, source
        self._clock = EventClock()
        self._value = {name: parameter.value for name, parameter in PARAMETERS.items()}
        self._end = DAYS * 86400.0
        self._done = 0.0
        """Seconds of useful training."""
        self._durable = 0.0
        """Progress of the newest committed checkpoint."""
        self._since: float | None = None
        """When the present stretch of steps began."""
        self._life = 0
        """Number of faults: events of an earlier life have no effect."""

    def run(self) -> float:
        self._train()
        while self._clock.now < self._end and self._clock.step():
            pass
        self._pause()
        return self._done / self._clock.now

    def _train(self) -> None:
        life = self._life
        self._since = self._clock.now
        self._clock.after(self._source.expovariate(1 / self._mttf), lambda: self._fault(life))
        self._clock.after(self._interval, lambda: self._save(life))

    def _pause(self) -> None:
        if self._since is not None:
            self._done += self._clock.now - self._since
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
        lost = self._source.random() < self._value["share of lost nodes"]
        kept = self._durable
        if self._recovery.keeps_snapshot(node_lost=lost):
            interval = self._value["snapshot interval"]
            kept = max(kept, self._done - self._source.uniform(0, min(interval, self._done)))
        self._done = kept
        self._clock.after(self._recovery.restart_seconds(node_lost=lost), self._train)
