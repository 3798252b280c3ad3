"""Idle stretches of a GPU: how long it was idle, and whether that counts as a problem of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcaccel.core.samples import IDLE_SECONDS, GpuSample, Sample, is_idle

__all__ = ["IdleStretch", "Work", "gpu_of", "stretches_of"]

ALONE_SECONDS = 1800.0
"""How long a GPU must be idle to count if no other GPU works and no steps are recorded."""
SLOT_SECONDS = 60.0
"""Resolution with which the work of different GPUs is compared."""


class Work:
    """Which GPUs of one attempt were busy at which times."""

    def __init__(self, nodes: Iterable[Sequence[Sample]]) -> None:
        self._busy: dict[int, set[str]] = defaultdict(set)
        for lines in nodes:
            for line in lines:
                busy = {gpu.uuid for gpu in line.gpus if gpu.utilization and not is_idle(gpu, line.seconds)}
                for slot in _slots(line) if busy else ():
                    self._busy[slot] |= busy

    def elsewhere(self, line: Sample, uuid: str) -> bool:
        """Whether another GPU was busy during the time of ``line``."""
        busy = (self._busy.get(slot) or {uuid} for slot in _slots(line))
        return any(len(uuids) > 1 or uuid not in uuids for uuids in busy)


def _slots(line: Sample) -> range:
    return range(int((line.time - line.seconds) // SLOT_SECONDS), int(line.time // SLOT_SECONDS) + 1)


@dataclass
class IdleStretch:
    """Consecutive lines in which a GPU was idle."""

    since_step: int | None
    seconds: float = 0.0
    step: int | None = None
    others_work: bool = False

    @property
    def counts(self) -> bool:
        trains = self.step is not None and self.step != (self.since_step or 0)
        return self.seconds >= (IDLE_SECONDS if trains or self.others_work else ALONE_SECONDS)


def stretches_of(uuid: str, lines: Sequence[Sample], work: Work) -> list[IdleStretch]:
    """The idle stretches of one GPU. The last one is empty if the GPU worked in the last line."""
    found, step = [IdleStretch(None)], None
    for line in lines:
        gpu = gpu_of(line, uuid)
        if gpu is None or not is_idle(gpu, line.seconds):
            found.append(IdleStretch(line.step))
        else:
            last = found[-1]
            last.since_step = last.since_step if last.seconds else (step if step is not None else line.step)
            last.seconds += line.seconds
            last.step = line.step
            last.others_work = last.others_work or work.elsewhere(line, uuid)
        step = line.step
    return found


def gpu_of(line: Sample, uuid: str) -> GpuSample | None:
    """The sample of one GPU in a line; None if the line does not have it."""
    return next((gpu for gpu in line.gpus if gpu.uuid == uuid), None)
