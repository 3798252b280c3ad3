"""Counts of the messages and bytes that a rank sends in a stop agreement and in calls of the script.

The ranks are processes, which run hpcaccel's code on gloo groups; the kernel counts what they send.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from scale.forked_ranks import Traffic, with_folder

__all__ = ["TREE_WIDTH", "agreement", "call"]

TREE_WIDTH = 4
"""Ranks of a group in the counted trees, so that few ranks make several levels."""
TURNS, ROUNDS = 4, 3
SETTLE_SECONDS = 0.25
"""The kernel acknowledges the last bytes within this time."""
LIMIT = timedelta(seconds=120)


Shape = Literal["ring", "tree"]
"""gloo's ring of all ranks, or a tree of groups of ``TREE_WIDTH`` ranks."""


def agreement(ranks: int, shape: Shape) -> dict[str, float]:
    """Messages and bytes that the busiest rank sends in a stop agreement."""

    def one(dist: Any) -> Callable[[], object]:
        from hpcaccel.runtime.training.stop_agreement import StopAgreement

        agreement = StopAgreement(dist.new_group(backend="gloo"))

        def step() -> None:
            agreement.issue(stop=False, save=False)
            agreement.read()

        return step

    messages, sent = _busiest(ranks, shape, one)
    return {f"stop agreement, {shape}: messages": messages, f"stop agreement, {shape}: bytes": sent}


def call(ranks: int, shape: Shape) -> dict[str, float]:
    """Bytes that the busiest rank sends in calls of the script."""

    def barrier(dist: Any) -> Callable[[], object]:
        calls = _exchange(dist)
        return lambda: calls.call("wait_for_everyone")

    def gather(dist: Any) -> Callable[[], object]:
        import torch

        calls = _exchange(dist)
        return lambda: calls.call("gather", data=torch.zeros(8, dtype=torch.uint8))

    return {
        f"wait_for_everyone, {shape}: bytes": _busiest(ranks, shape, barrier)[1],
        f"gather of 8 bytes, {shape}: bytes": _busiest(ranks, shape, gather)[1],
    }


def _exchange(dist: Any) -> Any:
    from hpcaccel.runtime.distributed.collectives.collective_watchdog import CollectiveWatchdog
    from hpcaccel.runtime.distributed.collectives.exchange import Exchange

    store = dist.PrefixStore("status", dist.distributed_c10d._get_default_store())
    watchdog = CollectiveWatchdog(
        rank=dist.get_rank(), world_size=dist.get_world_size(), store=store, timeout_seconds=600.0
    )
    return Exchange(dist.new_group(backend="gloo"), watchdog)


def _busiest(ranks: int, shape: Shape, make: Callable[[Any], Callable[[], object]]) -> tuple[int, int]:
    """Messages and bytes that the busiest rank sends in one call of what ``make`` returns."""
    import torch.distributed as dist

    from hpcaccel.runtime.distributed import wide_groups

    wide_groups.WIDE = 1 if shape == "tree" else max(64, ranks)
    defaults = wide_groups.RankTree.__init__.__kwdefaults__
    assert defaults is not None
    defaults["width"] = TREE_WIDTH
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # connections that are not used take no part in the counts

    def rank_traffic(rank: int, folder: str) -> list[list[float]]:
        store = dist.FileStore(str(Path(folder) / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=LIMIT)
        step = make(dist)
        for _ in range(2):  # the first turns connect the ranks
            step()
        seen = [_settled()]
        for _ in range(ROUNDS):
            for _ in range(TURNS):
                step()
            seen.append(_settled())
        return [
            [(after.messages - before.messages) / TURNS, (after.bytes - before.bytes) / TURNS]
            for before, after in itertools.pairwise(seen)
        ]

    found = with_folder(ranks, rank_traffic)
    medians = [[statistics.median(part[which] for part in rounds) for which in (0, 1)] for rounds in found]
    return tuple(round(max(one[which] for one in medians)) for which in (0, 1))


def _settled() -> Traffic:
    time.sleep(SETTLE_SECONDS)
    return Traffic.now()
