"""Records that the ranks write into an attempt's folder: outcome, progress, saves, timing, heartbeats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpcaccel.core.records import Reason

__all__ = ["Beat", "Outcome", "Progress", "Save", "Timing", "busy_seconds", "whole_save_seconds"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of an attempt, written by rank 0 before it exits."""

    version: int = 1
    reason: Reason
    step: int
    checkpoint: str | None = None
    resume: bool = False
    """Whether the training is to be continued; False if it is complete."""
    first_loss: float | None = None
    last_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The step that an attempt resumed from, and the total number of steps of the training, if known."""

    version: int = 1
    resumed_step: int = 0
    resumed_from: str | None = None
    total_steps: int | None = None
    time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Save:
    """A committed checkpoint: a line of ``saves.jsonl``."""

    version: int = 1
    step: int
    reason: str = ""
    stall_seconds: float
    """How long the save blocked training on rank 0: until its commit, unless the save ran in the background."""
    seconds: float
    """From the start of the save to its commit."""
    waited_seconds: float = 0.0
    """How long of this time the writer waited, so that its writes disturb the training less."""
    bytes: int
    """Total size of the checkpoint's files."""
    written_bytes: int | None = None
    """Bytes that this save wrote: less than ``bytes`` if it linked a file of the checkpoint before, because tensors had
    not changed. None in records of earlier releases."""
    background: bool = False
    time: float = 0.0
    """When rank 0 detected the commit."""
    from_memory: bool = False
    """Whether a snapshot in memory was written, because a stop left too little time for a save of the last step."""


def busy_seconds(save: Mapping[str, Any]) -> float:
    """How long a save took to its commit, without deliberate waiting.

    Args:
        save: a ``Save`` as JSON, with ``seconds``.
    """
    return float(save["seconds"]) - float(save.get("waited_seconds", 0.0))


def whole_save_seconds(saves: Iterable[Mapping[str, Any]]) -> list[float]:
    """How long the saves took that wrote everything, without deliberate waiting.

    Args:
        saves: lines of ``saves.jsonl``.
    """
    whole = [save for save in saves if save.get("written_bytes") in (None, save.get("bytes"))]
    return [busy_seconds(save) for save in whole if "seconds" in save]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How an attempt's time was spent, on rank 0. Times are seconds since the epoch; None if not reached yet."""

    version: int = 1
    process_started: float | None = None
    imported: float | None = None
    """When ``Accelerator()`` or ``stop_gate()`` was called."""
    formed: float | None = None
    """When the process group was initialised."""
    prepared: float | None = None
    """When the script was ready to load a checkpoint or to start from scratch."""
    loaded: float | None = None
    first_step_time: float | None = None
    """End of the first step of this attempt."""
    resumed_step: int = 0
    last_step: int | None = None
    last_step_time: float | None = None
    step_seconds: float | None = None
    """Median step time, saves excluded."""
    slowest_step_seconds: float | None = None
    """Slowest step after the first one. An evaluation between two steps counts as part of the second."""
    saves: int = 0
    stall_seconds: float = 0.0
    """How long saves blocked training, in total. Includes snapshots in memory."""
    snapshot_seconds: float | None = None
    """The part of ``stall_seconds`` that snapshots in memory took; None without any, and in earlier releases."""
    save_seconds: float | None = None
    """Median time for which a save blocked training."""
    slowest_save_seconds: float | None = None
    """Longest time for which a save blocked training, in this attempt and earlier ones."""
    stall_before_first_step: float = 0.0
    stall_after_last_step: float = 0.0
    data_wait_seconds: float | None = None
    """Time since the first step for which the script has waited for batches of prepared loaders; None if no prepared
    loader is used, and in records of earlier releases."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A rank's heartbeat, ``attempts/<n>/heartbeats/<rank>.json``, replaced every few seconds by a thread of the rank.

    Readers compare it with the previous heartbeat, never with their own clock.
    """

    version: int = 1
    rank: int
    host: str
    pid: int
    number: int
    """Number of this heartbeat in its process."""
    time: float
    interval_seconds: float
    phase: str
    """starting, loading, training, evaluating, saving, finishing (after the loop) or leaving."""
    step: int
    first_step: int = 0
    """The step at which the current training loop began. The step after it takes longer than later steps."""
    batches: int = 0
    """Number of batches that prepared loaders returned. For programs with a stop gate, it counts other signs of
    progress."""
    calls: int = 0
    """Number of collectives called through hpcaccel."""
    step_seconds: float | None = None
    """Seconds per step over the last heartbeats; None until two of them have different steps."""
    waits_in: str | None = None
    """The collective in which the rank has been waiting for other ranks for more than a few seconds, if known."""
    waits: bool = False
    """Whether the main thread is waiting for other ranks or a device."""
    site: str = ""
    """Where the main thread is in the script, as ``file:line``."""
    stack: int = 0
    """Hash of the main thread's stack: if it does not change, the thread may be stuck."""
    thread: str = ""
    """Identifier of the main thread in a stack dump."""
    gpu: str = ""
    """UUID of the rank's GPU; empty if it has none, or if torch does not report the UUID."""
    left: str | None = None
    """Where the rank last left a loop early (by ``break``, ``return`` or an exception), as ``file:line``."""
