"""Snapshots of the training state in the memory of the nodes, from which crashed ranks resume: no tensor is read from
the disk.

Every rank copies its part of the state, the same bytes as for a checkpoint, into one of two files in shared memory, and
continues; a thread then computes the CRCs and publishes the part (see ``snapshot_parts``). A rank overwrites its older
part only after all ranks have published the newer one. So at any time there is a snapshot of which every rank holds its
part, once the first one is complete.

The files outlive the ranks. The ranks of the next attempt agree on the newest complete snapshot, send each other the
parts that a node lacks, and load it like a checkpoint: every byte that is read is compared with its CRC.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from hpcaccel.checkpoint import manifest_writer, snapshot_parts
from hpcaccel.checkpoint.dcp_storage import stored_lengths, tensor_of
from hpcaccel.checkpoint.part_files import COPIES, PartFile, PartFiles
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.rank_blocks import stored_file
from hpcaccel.checkpoint.save_content import FirstRank, SaveContent, collect
from hpcaccel.checkpoint.save_plan import AgreedPlan, PlanCache
from hpcaccel.checkpoint.shard_files import crc32
from hpcaccel.checkpoint.snapshot_memory import LARGEST_PART, SnapshotMemory
from hpcaccel.checkpoint.snapshot_parts import SnapshotKey, SnapshotRecord
from hpcaccel.checkpoint.snapshot_replicas import SnapshotReplicas
from hpcaccel.checkpoint.training_state import TrainingState
from hpcaccel.checkpoint.written_file import WrittenFile
from hpcaccel.checkpoint_files.snapshot_folder import SnapshotFolder
from hpcaccel.core.free_memory import available_bytes
from hpcaccel.errors import CheckpointError

__all__ = ["NodeSnapshots"]

log = logging.getLogger(__name__)


class NodeSnapshots:
    """Takes snapshots. ``take`` is collective. If a snapshot cannot be taken, this is logged, and the training
    continues without any: they are an addition to checkpoints.

    Args:
        folder: this node's folder of the run.
        attempt: number of the run's attempt.
        local_world_size: how many ranks share this node's memory.
        is_local_main: whether this rank manages the node's folder.
        replicas: whether to send each part to another node.
    """

    def __init__(
        self,
        ranks: CheckpointRanks,
        folder: SnapshotFolder,
        *,
        attempt: int,
        local_world_size: int,
        is_local_main: bool,
        replicas: bool = False,
    ) -> None:
        self._ranks = ranks
        self._folder = folder
        self._attempt = attempt
        self._local_world_size = local_world_size
        self._is_local_main = is_local_main
        self._plans = PlanCache()
        self._files = PartFiles(folder.path, f"buffer_{ranks.rank:05d}.{attempt}", rank=ranks.rank)
        self._wants_replicas = replicas
        self._replicas: SnapshotReplicas | None = None
        self._number = 0
        """Number of snapshots that this attempt has taken."""
        self._publisher: threading.Thread | None = None
        self._problem: str | None = None
        self._cpu_seconds = 0.0
        """CPU time of the thread that published the last snapshot."""
        self.is_on = True
        """Whether snapshots are taken; the same on all ranks."""

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
            if self._number == 0:
                self._begin(what, plan.file_bytes)
            self._number += 1
            key = SnapshotKey(self._attempt, self._number, step)
            self._copy(what, plan, planner, key, facts)
        except CheckpointError as error:  # on all ranks
            self.is_on = False
            self.close()
            self._files.remove()
            if self._ranks.is_first:
                log.warning("no more snapshots are kept in memory: %s", error)
        return time.monotonic() - begun + self._cpu_seconds / (os.cpu_count() or 1)

    def _plan(self, what: str, state: TrainingState) -> tuple[AgreedPlan, DefaultSavePlanner]:
        """Agree on what each rank copies, after all ranks have published their parts of the last snapshot."""
        ranks = self._ranks
        first = ranks.first(what, lambda: FirstRank.of(state)) if ranks.world_size > 1 else None

        def published_then_collected() -> SaveContent:
            self._wait()
            return collect(state, rank=ranks.rank, first=first)

        return self._plans.plan(ranks, what=what, collect=published_then_collected, begin=lambda: None)

    def _begin(self, what: str, size: int) -> None:
        """Before the first snapshot: connect to the next node, and check the memory of all ranks before any of them
        allocates some."""
        if self._wants_replicas:
            try:
                self._replicas = SnapshotReplicas(self._ranks, self._folder.path, attempt=self._attempt)
            except CheckpointError as error:  # on all ranks
                if self._ranks.is_first:
                    log.warning("%s", error)
        self._ranks.run(what, lambda: self._check_room(size))

    def _check_room(self, size: int) -> None:
        """Raises: CheckpointError: the node's memory is too small for the snapshots of all of its ranks."""
        copies = COPIES if self._replicas is None else 2 * COPIES
        needed = copies * size * self._local_world_size
        held = sum(path.stat().st_blocks * 512 for path in self._folder.path.rglob("*") if path.is_file())
        free = shutil.disk_usage(self._folder.path).free + held
        memory = available_bytes()
        free = free if memory is None else min(free, memory + held)
        if needed > LARGEST_PART * free:
            raise CheckpointError(
                f"{copies} snapshots of {size / 1e9:.2f} GB per rank (ranks on this node: {self._local_world_size}) do "
                f"not fit in {LARGEST_PART:.0%} of the {free / 1e9:.2f} GB that are free in memory and in "
                f"{self._folder.path}"
            )

    def _copy(
        self, what: str, plan: AgreedPlan, planner: DefaultSavePlanner, key: SnapshotKey, facts: dict[str, Any]
    ) -> None:
        """Copy this rank's part into its older file, and start the thread that publishes it."""
        file = self._ranks.run(what, lambda: self._free(plan.file_bytes))
        lengths = stored_lengths(plan.own)
        try:
            described = manifest_writer.describe(**facts) if self._ranks.is_first else None
            file.memory.snapshot((tensor_of(item, planner) for item in plan.own.items), lengths)
        except Exception as error:  # the other ranks continue; the next snapshot raises the error on all of them
            self._problem = f"{type(error).__name__}: {error}"
            return
        record = partial(SnapshotRecord, self._ranks.rank, self._ranks.world_size, facts=described)
        work = partial(self._publish, file, key, lengths, plan, lambda written: record(written=written))
        self._publisher = threading.Thread(target=work, name="snapshot-publisher", daemon=True)
        self._publisher.start()

    def _free(self, size: int) -> PartFile:
        """The file that may be overwritten, because all ranks hold a newer part."""
        if self._files.count == 1:
            self._remove_resumed()
        return self._files.free(size)

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
            return self._files.keys

        def newest(keys: list[set[SnapshotKey]]) -> SnapshotKey | None:
            return max(set.intersection(*keys), default=None)

        return self._ranks.reduce("the snapshots in memory cannot be read", published, newest)

    def part(self, key: SnapshotKey) -> tuple[SnapshotRecord, SnapshotMemory]:
        """The record and the memory of this rank's part.

        Raises:
            Damaged: the record is damaged.
        """
        memory = self._files.of(key).memory
        return snapshot_parts.read_record(self._folder.path, key, self._ranks.rank), memory

    # -- publishing

    def _publish(
        self,
        file: PartFile,
        key: SnapshotKey,
        lengths: list[int],
        plan: AgreedPlan,
        record: Callable[[WrittenFile], SnapshotRecord],
    ) -> None:
        begun = time.thread_time()
        try:
            crcs, offset = [], 0
            for length in lengths:
                crcs.append(crc32(file.memory.view[offset : offset + length]))
                offset += length
            name = stored_file(self._ranks.rank, self._ranks.world_size)
            made = record(WrittenFile.of(name, crcs, lengths, json.loads(plan.chunks), plan.others))
            self._files.publish(file, key, made)
            if self._replicas is not None:
                self._send(key, made, file.memory.view[:offset])
            self._cpu_seconds = time.thread_time() - begun
        except BaseException as error:  # raised on all ranks by the next snapshot
            self._problem = f"{type(error).__name__}: {error}"

    def _send(self, key: SnapshotKey, record: SnapshotRecord, content: memoryview) -> None:
        """Send the part to the next node. If that fails, this is logged, and this rank sends no more."""
        assert self._replicas is not None
        try:
            self._replicas.send(key, record, content)
        except (OSError, EOFError) as error:
            log.warning(
                "rank %d sends no more replicas of its snapshots: %s", self._ranks.rank, error or "connection lost"
            )
            self._wants_replicas, self._replicas = False, None

    def _wait(self) -> None:
        """Wait until this rank has published the last snapshot, and its replica.

        Raises:
            CheckpointError: it could not be published.
        """
        if self._publisher is not None:
            self._publisher.join()
            self._publisher = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise CheckpointError(problem)

    def close(self) -> None:
        """End the work in the background. Not collective."""
        if self._publisher is not None:
            self._publisher.join()
        if self._replicas is not None:
            self._replicas.close()
