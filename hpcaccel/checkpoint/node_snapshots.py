"""Snapshots of the training state in the memory of the nodes, from which crashed ranks resume without reading a disk.

Every rank copies its part of the state, the same bytes as for a checkpoint, into one of two files in shared memory, and
continues; a thread then computes the CRCs and publishes the part (see ``snapshot_parts``). A rank overwrites its older
part only after all ranks have published the newer one. So at any time there is a snapshot of which every rank holds its
part, once the first one is complete.

The files outlive the ranks. The ranks of the next attempt agree on the newest complete snapshot, send each other the
parts that a node lacks, and load it like a checkpoint: every byte that is read is compared with its CRC.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from hpcaccel.checkpoint import manifest_writer, snapshot_parts
from hpcaccel.checkpoint.commit import WrittenFile
from hpcaccel.checkpoint.dcp_storage import stored_lengths, tensor_of
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.save_plan import AgreedPlan, FirstRank, PlanCache, collect
from hpcaccel.checkpoint.shard_files import crc32, rank_file
from hpcaccel.checkpoint.snapshot_memory import LARGEST_PART, SnapshotMemory, available_bytes
from hpcaccel.checkpoint.snapshot_parts import SnapshotKey, SnapshotRecord
from hpcaccel.checkpoint.training_state import TrainingState
from hpcaccel.checkpoint_files.snapshot_folder import SnapshotFolder
from hpcaccel.errors import CheckpointError

__all__ = ["NodeSnapshots"]

log = logging.getLogger(__name__)

COPIES = 2
"""Number of files per rank: one is complete while the other is written."""
SLACK, SLACK_BYTES = 100, 64 << 10
"""A file is larger than its first part, by one ``SLACK``-th and ``SLACK_BYTES``."""


@dataclass
class _Slot:
    """One of a rank's files in shared memory.

    Args:
        file: its path while it is not published.
        key: the snapshot that it is part of; None while it is not published.
    """

    file: Path
    memory: SnapshotMemory
    key: SnapshotKey | None = None


class NodeSnapshots:
    """Takes snapshots. ``take`` is collective. If a snapshot cannot be taken, this is logged, and the training
    continues without any: they are an addition to checkpoints.

    Args:
        folder: this node's folder of the run.
        attempt: number of the run's attempt.
        local_world_size: how many ranks share this node's memory.
        is_local_main: whether this rank looks after the node's folder.
    """

    def __init__(
        self,
        ranks: CheckpointRanks,
        folder: SnapshotFolder,
        *,
        attempt: int,
        local_world_size: int,
        is_local_main: bool,
    ) -> None:
        self._ranks = ranks
        self._folder = folder
        self._attempt = attempt
        self._local_world_size = local_world_size
        self._is_local_main = is_local_main
        self._plans = PlanCache()
        self._slots: list[_Slot] = []
        self._number = 0
        """Number of snapshots that this attempt has taken."""
        self._publisher: threading.Thread | None = None
        self._problem: str | None = None
        self._cpu_seconds = 0.0
        """CPU time of the thread that published the last snapshot."""
        self.is_on = True
        """Whether snapshots are taken; the same on all ranks."""
        self.newest: SnapshotKey | None = None
        """The last snapshot of this attempt that all ranks have published, as far as this rank knows."""

    # -- taking

    def take(self, state: TrainingState, facts: dict[str, Any]) -> float:
        """Copy the training state into shared memory. A thread publishes it later.

        Args:
            facts: step, epoch, reason and so on, for the manifest.

        Returns:
            This snapshot's cost in seconds: how long training waited, and this rank's share of a processor for the
            CRCs of the last snapshot.
        """
        begun = time.monotonic()
        step = int(facts["step"])
        what = f"the snapshot of step {step} cannot be taken"
        try:
            plan, planner = self._plan(what, state)
            if self._number == 0:  # all ranks check before any rank allocates: then less memory would be free
                self._ranks.run(what, lambda: self._check_room(plan.file_bytes))
            self._number += 1
            key = SnapshotKey(self._attempt, self._number, step)
            self._copy(what, plan, planner, key, facts)
        except CheckpointError as error:  # on all ranks
            self.is_on = False
            self._remove_slots()
            if self._ranks.is_first:
                log.warning("no more snapshots are kept in memory: %s", error)
        return time.monotonic() - begun + self._cpu_seconds / (os.cpu_count() or 1)

    def _plan(self, what: str, state: TrainingState) -> tuple[AgreedPlan, DefaultSavePlanner]:
        """Agree on what each rank copies, after all ranks have published their parts of the last snapshot."""
        ranks = self._ranks
        first = ranks.first(what, lambda: FirstRank.of(state)) if ranks.world_size > 1 else None

        def published_then_collected() -> dict[str, Any]:
            self._wait()
            return collect(state, rank=ranks.rank, first=first)

        plan = self._plans.plan(ranks, what=what, collect=published_then_collected, begin=lambda: None)
        self.newest = max((slot.key for slot in self._slots if slot.key is not None), default=None)
        return plan

    def _check_room(self, size: int) -> None:
        """Raises: CheckpointError: the node's memory is too small for the snapshots of all of its ranks."""
        needed = COPIES * size * self._local_world_size
        held = sum(path.stat().st_blocks * 512 for path in self._folder.path.rglob("*") if path.is_file())
        free = shutil.disk_usage(self._folder.path).free + held
        memory = available_bytes()
        free = free if memory is None else min(free, memory + held)
        if needed > LARGEST_PART * free:
            raise CheckpointError(
                f"{COPIES} snapshots of {size / 1e9:.2f} GB per rank (ranks on this node: {self._local_world_size}) do "
                f"not fit in {LARGEST_PART:.0%} of the {free / 1e9:.2f} GB of free memory and {self._folder.path}"
            )

    def _copy(
        self, what: str, plan: AgreedPlan, planner: DefaultSavePlanner, key: SnapshotKey, facts: dict[str, Any]
    ) -> None:
        """Copy this rank's part into its older file, and start the thread that publishes it."""
        slot = self._ranks.run(what, lambda: self._free_slot(plan.file_bytes))
        lengths = stored_lengths(plan.own)
        head = None
        try:
            if self._ranks.is_first:
                head = {"facts": manifest_writer.describe(**facts), "index": plan.index.decode()}
            slot.memory.snapshot((tensor_of(item, planner) for item in plan.own.items), lengths)
        except Exception as error:  # the other ranks continue; the next snapshot raises the error on all of them
            self._problem = f"{type(error).__name__}: {error}"
            return
        record = partial(SnapshotRecord, self._ranks.rank, self._ranks.world_size, head=head)
        work = partial(self._publish, slot, key, lengths, lambda written: record(written=written))
        self._publisher = threading.Thread(target=work, name="snapshot-publisher", daemon=True)
        self._publisher.start()

    def _free_slot(self, size: int) -> _Slot:
        """The file that may be overwritten, because all ranks hold a newer part. It is replaced if it is too small."""
        rank = self._ranks.rank
        if len(self._slots) < COPIES:
            if self._slots:
                self._remove_resumed()
            file = self._folder.path / f"buffer_{rank:05d}.{self._attempt}.{len(self._slots)}"
            self._slots.append(_Slot(file, self._allocate(size, file)))
            return self._slots[-1]
        slot = min(self._slots, key=lambda slot: slot.key or (0, 0, 0))
        if slot.key is not None:
            snapshot_parts.withdraw(self._folder.path, slot.key, rank, slot.file)
            slot.key = None
        if slot.memory.size < size:
            slot.file.unlink()
            slot.memory = self._allocate(size, slot.file)
        return slot

    def _allocate(self, size: int, file: Path) -> SnapshotMemory:
        """Memory for ``size`` bytes, and for trees of values that are longer at the next snapshot."""
        file.unlink(missing_ok=True)
        try:
            return SnapshotMemory(size + size // SLACK + SLACK_BYTES, file)
        except OSError as error:
            file.unlink(missing_ok=True)
            raise CheckpointError(f"cannot allocate {size:,} bytes in {file}: {error.strerror or error}") from None

    def _remove_resumed(self) -> None:
        """Remove the snapshot that this attempt was resumed from, which a newer one has replaced."""
        if self._is_local_main:
            for place in self._folder.path.iterdir():
                key = SnapshotKey.of(place.name)
                if key is not None and key.attempt < self._attempt:
                    shutil.rmtree(place, ignore_errors=True)

    # -- reading

    def agree(self) -> SnapshotKey | None:
        """The newest snapshot of this attempt of which all ranks hold their parts; None if there is none.
        Collective."""

        def published() -> set[SnapshotKey]:
            with contextlib.suppress(CheckpointError):  # the older part is still there
                self._wait()
            return {slot.key for slot in self._slots if slot.key is not None}

        return self._ranks.reduce(
            "the snapshots in memory cannot be read", published, lambda keys: max(set.intersection(*keys), default=None)
        )

    def part(self, key: SnapshotKey) -> tuple[SnapshotRecord, SnapshotMemory]:
        """The record and the memory of this rank's part.

        Raises:
            Damaged: the record is damaged.
        """
        slot = next(slot for slot in self._slots if slot.key == key)
        return snapshot_parts.read_record(self._folder.path, key, self._ranks.rank), slot.memory

    # -- publishing

    def _publish(
        self, slot: _Slot, key: SnapshotKey, lengths: list[int], record: Callable[[WrittenFile], SnapshotRecord]
    ) -> None:
        begun = time.thread_time()
        try:
            crcs, offset = [], 0
            for length in lengths:
                crcs.append(crc32(slot.memory.view[offset : offset + length]))
                offset += length
            written = WrittenFile.of(rank_file(self._ranks.rank), crcs, lengths)
            snapshot_parts.publish(self._folder.path, key, record(written), slot.file)
            slot.key = key
            self._cpu_seconds = time.thread_time() - begun
        except BaseException as error:  # raised on all ranks by the next snapshot
            self._problem = f"{type(error).__name__}: {error}"

    def _wait(self) -> None:
        """Wait until this rank has published the last snapshot.

        Raises:
            CheckpointError: it could not be published.
        """
        if self._publisher is not None:
            self._publisher.join()
            self._publisher = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise CheckpointError(problem)

    def _remove_slots(self) -> None:
        """Delete this rank's files."""
        if self._publisher is not None:
            self._publisher.join()
        for slot in self._slots:
            if slot.key is not None:
                with contextlib.suppress(FileNotFoundError):
                    snapshot_parts.withdraw(self._folder.path, slot.key, self._ranks.rank, slot.file)
            slot.file.unlink(missing_ok=True)
        self._slots.clear()
