"""One save, from the question what is to be written to the rename."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import commit, manifest_writer
from hpcaccel.checkpoint.background import Job
from hpcaccel.checkpoint.collect import FirstRank, collect
from hpcaccel.checkpoint.dcp_planners import Planned, SavePlanning, write_tensors
from hpcaccel.checkpoint.dcp_storage import ShardWriter, stored_lengths
from hpcaccel.checkpoint.rank_agreement import Ranks
from hpcaccel.checkpoint.snapshot_memory import Memory
from hpcaccel.checkpoint.training_state import TrainingState
from hpcaccel.checkpoint.writer_files import rank_file
from hpcaccel.errors import CheckpointError

__all__ = ["PlannedSave"]

T = TypeVar("T")


class PlannedSave:
    """The save of one step; its methods are called in this order, by all of ``ranks`` together.

    Args:
        directory: where the checkpoint appears.
        attempt: names the temporary directory.
        facts: what the manifest says; ``step`` among it.
        fill: see ``CheckpointEngine.save``.
    """

    def __init__(
        self,
        ranks: Ranks,
        directory: Path,
        attempt: int | str,
        state: TrainingState,
        facts: dict[str, Any],
        fill: Callable[[Path], None] | None,
    ) -> None:
        self.step: int = facts["step"]
        self.what = f"the checkpoint of step {self.step} cannot be saved"
        self.final = directory / checkpoint_files.checkpoint_name(self.step)
        self._ranks = ranks
        self._state = state
        self._facts = facts
        self._fill = fill
        self._temporary = directory / checkpoint_files.temporary_name(self.step, attempt)
        self._extra = directory / checkpoint_files.temporary_name(self.step, f"{attempt}.extra")
        self._results = directory / checkpoint_files.temporary_name(self.step, f"{attempt}.results")
        self._writer: ShardWriter | None = None

    def first(self, work: Callable[[], T]) -> T:
        """See ``Ranks.first``."""
        return self._ranks.first(self.what, work)

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Leave nothing behind when it fails, on whichever rank."""
        try:
            yield
        except CheckpointError:
            if self._ranks.is_first:
                for path in (self._temporary, self._extra, self._results):
                    shutil.rmtree(path, ignore_errors=True)  # what stays is removed before the next save
            raise

    def plan(
        self, planning: SavePlanning, memory: Memory | None, *, background: bool
    ) -> tuple[Planned, DefaultSavePlanner]:
        """Who writes what. When this returns the directory is there, and one for the writers' results."""
        if self._fill is not None:
            self._let_fill(self._fill)
        first = self.first(lambda: FirstRank.of(self._state)) if self._ranks.world_size > 1 else None
        return planning.plan(
            self._ranks,
            self.writer(memory),
            what=self.what,
            collect=lambda: collect(self._state, rank=self._ranks.rank, first=first),
            begin=lambda: self._begin(background),
        )

    def writer(self, memory: Memory | None) -> ShardWriter:
        self._writer = ShardWriter(self._temporary, rank=self._ranks.rank, facts=self._facts, memory=memory)
        return self._writer

    def write(self, planned: Planned, planner: DefaultSavePlanner) -> None:
        """Write and commit, and wait for it."""
        assert self._writer is not None
        write_tensors(self._ranks, self._writer, planned, planner, what=self.what, commit=self._publish)

    def job(self, planned: Planned, begun: float, *, prune: dict[str, Any] | None) -> Job:
        """What the writers are to do, once there is a snapshot."""
        order: dict[str, Any] = {
            "temporary": str(self._temporary),
            "final": str(self.final),
            "results": str(self._results),
            "file": rank_file(self._ranks.rank),
            "lengths": stored_lengths(planned.own),
        }
        if self._ranks.is_first:
            files = {piece.file for piece in planned.pieces.values()}
            order |= {"files": len(files), "facts": manifest_writer.build(files=[], **self._facts), "prune": prune}
        return Job(self.what, self.step, self._facts["reason"], begun, order)

    @property
    def bytes(self) -> int:
        """Of the whole checkpoint, on rank 0."""
        return 0 if self._writer is None else self._writer.bytes

    def _let_fill(self, fill: Callable[[Path], None]) -> None:
        self.first(lambda: commit.begin(self._extra))
        self._ranks.run(self.what, lambda: fill(self._extra))
        self._state.without = self._ranks.broadcast(self._state.without)

    def _begin(self, background: bool) -> None:
        commit.begin(self._temporary)
        if background:
            commit.begin(self._results)

    def _publish(self) -> None:
        shutil.rmtree(self._results, ignore_errors=True)
        if self._fill is not None:
            commit.adopt(self._extra, self._temporary)
        commit.publish(self._temporary, self.final)
