"""Measurements of what a new plan and a large index cost: rank 0 plans the chunks of all ranks, and every rank parses
the index at a load. The plans of all ranks are made in one process, and planned by torch's planner as in a save."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

__all__ = ["TENSORS", "plan_costs"]

TENSORS = 64
"""Tensors, each split over all ranks."""
TURNS = 5
ROWS, COLUMNS = 4, 1024


def plan_costs(ranks: int) -> dict[str, float]:
    """Bytes that rank 0 receives, seconds in which it plans, bytes of the index, and seconds in which a rank parses it.

    The fastest of ``TURNS`` turns.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from hpcaccel.checkpoint.dcp_storage import pieces_of
    from hpcaccel.checkpoint.manifest_writer import Index
    from hpcaccel.checkpoint.rank_blocks import stored_file

    plans = [_plan(rank, ranks) for rank in range(ranks)]

    def planned() -> tuple[list[Any], Any]:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({}, is_coordinator=True)
        return planner.create_global_plan(plans)

    (agreed, metadata), plan_seconds = _fastest(planned)
    pieces = {}
    for rank, plan in enumerate(agreed):
        places = pieces_of(plan, stored_file(rank, ranks))
        pieces.update({item.index: piece for item, piece in zip(plan.items, places, strict=True)})
    text = Index(metadata, pieces).to_json()
    _, parse_seconds = _fastest(lambda: Index.from_json(text))
    return {
        "plan_bytes": sum(len(pickle.dumps(plan)) for plan in plans),
        "plan_seconds": plan_seconds,
        "index_bytes": len(text),
        "parse_seconds": parse_seconds,
    }


def _plan(rank: int, ranks: int) -> Any:
    """The plan of a rank of FSDP2 that has a part of each tensor."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    at = torch.Size((rank * ROWS, 0))
    part, whole = torch.Size((ROWS, COLUMNS)), torch.Size((ROWS * ranks, COLUMNS))
    items = []
    for number in range(TENSORS):
        data = TensorWriteData(ChunkStorageMetadata(at, part), TensorProperties(dtype=torch.float32), whole)
        index = MetadataIndex(f"models.0.layers.{number}.attention.weight", at)
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def _fastest(call: Callable[[], Any]) -> tuple[Any, float]:
    taken, result = [], None
    for _ in range(TURNS):
        begun = time.thread_time()  # nothing in it waits, and other processes take no part
        result = call()
        taken.append(time.thread_time() - begun)
    return result, min(taken)
