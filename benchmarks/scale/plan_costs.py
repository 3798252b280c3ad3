"""Measurements of what a new plan and a large index cost: each rank plans alone, and the ranks add up along a tree what
they write together; every rank parses a part of the index at a load.

The plan is that of one rank of a process group of torch's that sends nothing (``fake``), so that every number of ranks
is real.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scale.forked_ranks import in_processes

if TYPE_CHECKING:
    from hpcaccel.checkpoint.written_file import WrittenFile

__all__ = ["TENSORS", "index_costs", "plan_costs", "snapshot_index_bytes"]

TENSORS = 64
"""Tensors, each split over all ranks."""
TURNS = 5
ROWS, COLUMNS = 4, 1024


def plan_costs(ranks: int) -> dict[str, float]:
    """Bytes of the largest message of a new plan, and seconds in which rank 0 plans its part and adds up those of all.

    The fastest of ``TURNS`` turns.
    """
    (found,) = in_processes(1, lambda rank: _plan_costs(ranks))
    return dict(found)


def _plan_costs(ranks: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hpcaccel.checkpoint.plan_dedup import Coverage, own_items
    from hpcaccel.checkpoint.save_content import SaveContent

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    part = torch.zeros(ROWS, COLUMNS)
    names = [f"models.0.layers.{number}.attention.weight" for number in range(TENSORS)]
    content = SaveContent({name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for name in names})
    others = (ranks - 1).bit_length()  # messages that rank 0 receives, one after the other

    def planned() -> Coverage:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(content.tensors, is_coordinator=True)
        items = planner.create_local_plan().items
        own = own_items(items, content, rank=0, ranks=ranks)
        coverage = Coverage.of(items, own, content, ranks=ranks)
        for _ in range(others):
            coverage = coverage.joined(pickle.loads(pickle.dumps(coverage)))  # noqa: S301 (made here)
        return coverage

    coverage, seconds = _fastest(planned)
    return {"message_bytes": len(pickle.dumps(coverage)), "seconds": seconds}


def index_costs(ranks: int) -> dict[str, float]:
    """Bytes of the index, and seconds in which a rank parses it. The fastest of ``TURNS`` turns."""
    from hpcaccel.checkpoint.manifest_writer import Index
    from hpcaccel.checkpoint.written_file import index_of

    text = index_of(_written(rank, ranks) for rank in range(ranks))
    _, parse_seconds = _fastest(lambda: Index.from_json(text))
    return {"index_bytes": len(text), "parse_seconds": parse_seconds}


def snapshot_index_bytes(ranks: int) -> float:
    """Bytes of the index of a snapshot in memory that a rank receives, and adds from the record of its own part.

    Args:
        ranks: a power of two.
    """
    from hpcaccel.checkpoint.snapshot_index import SnapshotSummary
    from hpcaccel.checkpoint.snapshot_parts import SnapshotRecord
    from hpcaccel.checkpoint.written_file import index_text, tensors_of

    record = SnapshotRecord(0, ranks, _written(0, ranks), facts={"step": 1})
    summary = SnapshotSummary.of([record], whole=False)
    for _ in range((ranks - 1).bit_length()):  # messages that rank 0 receives, one after the other
        summary = summary.joined(pickle.loads(pickle.dumps(summary)))  # noqa: S301 (made here)
    _, text = summary.manifest_and_index()
    return len(text) + len(index_text(tensors_of([record.written], lambda chunk: chunk.in_block)))


def _written(rank: int, ranks: int) -> WrittenFile:
    """The file of a rank with its part of each tensor."""
    from hpcaccel.checkpoint.rank_blocks import stored_file
    from hpcaccel.checkpoint.written_file import PlannedChunk, WrittenFile

    size, shape, length = [ROWS * ranks, COLUMNS], [ROWS, COLUMNS], 4 * ROWS * COLUMNS
    names = (f"models.0.layers.{number}.attention.weight" for number in range(TENSORS))
    chunks = [PlannedChunk(name, "float32", size, [rank * ROWS, 0], shape, length, in_block=True) for name in names]
    return WrittenFile.of(stored_file(rank, ranks), [0] * TENSORS, [length] * TENSORS, chunks)


def _fastest(call: Callable[[], Any]) -> tuple[Any, float]:
    taken, result = [], None
    for _ in range(TURNS):
        begun = time.thread_time()  # nothing in it waits, and other processes take no part
        result = call()
        taken.append(time.thread_time() - begun)
    return result, min(taken)
