"""State of each rank of an attempt: its step, its step time, and whether it is slow, silent or at fault."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcaccel.core.durable_files import read_json, read_lines
from hpcaccel.core.rank_records import Beat
from hpcaccel.core.records import AttemptEnd, AttemptStart, Hang, from_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunDirectoryError
from hpcaccel.view.usage import Usage

__all__ = ["RankState", "blame_of", "failed_rank", "rank_in_detail", "rank_states", "read_hang", "slow_ranks"]

SILENT_BEATS = 6
"""A rank is silent if its newest heartbeat is this many intervals older than the newest one of all ranks."""
CLOCK_SECONDS = 60.0
"""Tolerated difference between this machine's clock and those of the nodes."""
_RANK_OF_DETAIL = re.compile(r"(?:^|; the last one: )rank (\d+)\b")
_SHOWN_BY_OTHERS = ("node_failure", "left", "rendezvous", "nccl_timeout", "gloo_timeout")
"""Causes that are found in the logs of ranks that are not at fault themselves."""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank of the newest attempt."""

    rank: int
    node: str
    """Empty if unknown."""
    local_rank: int | None
    """Number of the rank on its node; None if the ranks per node are unknown."""
    step: int | None
    """Step in the rank's newest heartbeat; None without a heartbeat."""
    step_seconds: float | None
    state: str
    """``ok``, ``slow`` (delays the other ranks), ``silent`` (sends no heartbeats), ``blamed`` (at fault for a hang or
    a failure; if only nodes are known to be, each of their ranks) or ``ended``."""
    phase: str = ""
    """What the rank last reported: starting, loading, training, evaluating, saving, finishing or leaving."""
    site: str = ""
    """Where the rank is in the script, as ``file:line``."""
    waits_in: str | None = None
    """The collective in which the rank has been waiting for other ranks for more than a few seconds."""
    ratio: float | None = None
    """Of a slow rank: its own time divided by the median of all ranks."""
    gpu: str | None = None
    """UUID of the rank's GPU; None if neither samples nor the rank report it."""
    idle_gpu: bool = False
    """Whether the rank's GPU has been idle, if there are samples."""


def rank_states(
    run: RunDir,
    start: AttemptStart,
    end: AttemptEnd | None,
    *,
    active: bool,
    now: float | None = None,
    used: Usage | None = None,
) -> list[RankState]:
    """The ranks of one attempt, by number.

    Args:
        start: the attempt's start line in the ledger.
        end: its end line, if it has ended.
        active: whether the run has not ended, so that an attempt without an end line is running.
        used: the run's use of resources; None without samples.
    """
    now = time.time() if now is None else now
    beats = _beats(run, start.attempt)
    count = max(start.ranks, 1 + max(beats, default=-1))
    slow = {one["rank"]: one for one in slow_ranks(run, start.attempt)}
    over = end is not None or not active
    blamed = None if end is None else failed_rank(run, end)
    gpus = {} if used is None else {gpu.rank: gpu for gpu in used.gpus if gpu.rank is not None}
    newest = max((beat.time for beat in beats.values()), default=0.0)
    found = []
    for rank in range(count):
        beat = beats.get(rank)
        node, local_rank = _place(start, rank, count, beat)
        is_blamed = rank == blamed or (blamed is None and end is not None and bool(node) and node in end.nodes_blamed)
        found.append(
            RankState(
                rank=rank,
                node=node,
                local_rank=local_rank,
                step=None if beat is None else beat.step,
                step_seconds=None if beat is None else beat.step_seconds,
                state=_state(beat, over=over, blamed=is_blamed, slow=rank in slow, newest=newest, now=now),
                phase="" if beat is None else beat.phase,
                site="" if beat is None else beat.site,
                waits_in=None if beat is None else beat.waits_in,
                ratio=slow[rank].get("ratio") if rank in slow and not over else None,
                gpu=gpus[rank].uuid if rank in gpus else (beat.gpu or None) if beat is not None else None,
                idle_gpu=not over and rank in gpus and gpus[rank].idle_now,
            )
        )
    return found


def slow_ranks(run: RunDir, attempt: int) -> list[dict[str, Any]]:
    """The slow ranks in the newest line of an attempt's stragglers file: rank, node and ratio of each."""
    lines = [line for line, _ in read_lines(run.stragglers(attempt))]
    return list(lines[-1]["slow"]) if lines else []


def read_hang(run: RunDir, attempt: int) -> Hang | None:
    """The hang that ended an attempt; None if none did, or if its file is damaged."""
    try:
        value = read_json(run.hang(attempt))
        return None if value is None else from_dict(Hang, value)
    except (OSError, RunDirectoryError, TypeError):
        return None


def _state(beat: Beat | None, *, over: bool, blamed: bool, slow: bool, newest: float, now: float) -> str:
    if blamed:
        return "blamed"
    if over:
        return "ended"
    if beat is not None:
        silence = SILENT_BEATS * beat.interval_seconds
        if newest - beat.time > silence or now - beat.time > silence + CLOCK_SECONDS:
            return "silent"
    return "slow" if slow else "ok"


def _beats(run: RunDir, attempt: int) -> dict[int, Beat]:
    """The newest heartbeat of each rank. Damaged files are left out."""
    found = {}
    folder = run.heartbeats(attempt)
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    for name in names:
        stem, _, suffix = name.partition(".")
        if suffix != "json" or not stem.isdecimal():
            continue
        try:
            value = read_json(folder / name)
            if value is not None:
                found[int(stem)] = from_dict(Beat, value)
        except (OSError, RunDirectoryError, TypeError):
            continue
    return found


def failed_rank(run: RunDir, end: AttemptEnd) -> int | None:
    """The rank that failed first in an attempt, or that the other ranks waited for in a hang.

    Earlier releases wrote the rank in the detail only. If the cause only shows that another rank is gone, the rank in
    the detail is not at fault, and None is returned.
    """
    if end.reason != "failed":
        return None
    if end.rank_blamed is not None:
        return end.rank_blamed
    if end.error_class == "hang":
        hang = read_hang(run, end.attempt)
        return None if hang is None else hang.culprit_rank
    return None if end.error_class in _SHOWN_BY_OTHERS else rank_in_detail(end)


def blame_of(rank: int, ranks: Sequence[RankState], error_class: str) -> str:
    """The title of the traceback of ``rank``. It says "failed first" only if no other rank is known to be at fault.

    Args:
        ranks: the ranks of the newest attempt.
        error_class: class of the run's last failure.
    """
    if error_class == "hang":
        return f"Rank {rank} is the one that the others wait for"
    is_first = [one.rank for one in ranks if one.state == "blamed"] == [rank]
    return f"Rank {rank} failed first" if is_first else f"Rank {rank} failed"


def rank_in_detail(end: AttemptEnd) -> int | None:
    """The rank that the detail of a failure begins with: the one whose log shows the cause."""
    named = _RANK_OF_DETAIL.search(end.detail)
    return int(named[1]) if named else None


def _place(start: AttemptStart, rank: int, count: int, beat: Beat | None) -> tuple[str, int | None]:
    """Node and local number of a rank: ranks are placed node by node, the same number on each."""
    nodes = start.nodes
    if not nodes or count % len(nodes):
        return ("" if beat is None else beat.host), None
    each = count // len(nodes)
    return nodes[rank // each], rank % each
