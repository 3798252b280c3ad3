"""Snapshots of the prepared objects in the memory of the nodes: takes them, and resumes from them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcaccel.core.process_identity import node_name
from hpcaccel.errors import CheckpointError, Damaged
from hpcaccel.runtime.checkpointing.prepared_objects import PreparedObjects
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.rank_logger import TRAINING_LOG
from hpcaccel.runtime.settings import OutputLocation, Settings

if TYPE_CHECKING:
    # These imports take half a second; a program needs them only at its first save or load.
    from hpcaccel.checkpoint import CheckpointEngine, LoadedCheckpoint
    from hpcaccel.checkpoint.node_snapshots import NodeSnapshots
    from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
    from hpcaccel.checkpoint.snapshot_resume import SnapshotResume
    from hpcaccel.checkpoint.snapshot_transfer import FoundSnapshot
    from hpcaccel.checkpoint.training_state import Stateful
    from hpcaccel.checkpoint_files.snapshot_folder import SnapshotFolder

__all__ = ["SnapshotManager"]

logger = logging.getLogger(TRAINING_LOG)


class SnapshotManager:
    """Takes and loads the snapshots of a run. All ranks call its methods together, unless noted."""

    def __init__(self, place: OutputLocation, group: RankGroup, settings: Settings, prepared: PreparedObjects) -> None:
        self._place = place
        self._group = group
        self._prepared = prepared
        self.is_on = settings.snapshot_every_steps is not None and place.run is not None
        """Whether snapshots are taken and loaded; the same on all ranks."""
        self._folder: SnapshotFolder | None = None
        self._taking: NodeSnapshots | None = None
        self._replicas = settings.snapshot_replicas > 0
        self._loads = settings.resume != "never"

    # -- taking

    def take(self, counters: Stateful, *, step: int, epoch: int, doubts: Sequence[str]) -> float:
        """Take a snapshot. If it cannot be taken, this is logged, and ``is_on`` becomes False.

        Args:
            doubts: reasons why it is not bit-exact; empty if it is.

        Returns:
            Its cost in seconds; see ``NodeSnapshots.take``.
        """
        from hpcaccel.checkpoint import capture_rng

        if not self._prepare():
            return 0.0
        if self._taking is None:
            self._taking = self._snapshots()
        state = self._prepared.as_state(counters, {"rng": capture_rng(self._group.device)})
        facts = {
            "step": step,
            "epoch": epoch,
            "reason": "snapshot",
            "guarantee": "state-exact" if doubts else "bit-exact",
            "guarantee_reasons": list(doubts),
            "world_size": self._group.world_size,
            "mesh": state.mesh,
            "attempt": self._place.attempt,
        }
        cost = self._taking.take(state, facts)
        self.is_on = self._taking.is_on
        return cost

    def _snapshots(self) -> NodeSnapshots:
        from hpcaccel.checkpoint.node_snapshots import NodeSnapshots

        assert self._folder is not None
        return NodeSnapshots(
            self._ranks(),
            self._folder,
            attempt=self._place.attempt,
            local_world_size=self._group.env.local_world_size,
            is_local_main=self._is_local_main,
            replicas=self._replicas,
        )

    def commit(self, engine: CheckpointEngine, reason: str, *, deadline: float | None) -> int | None:
        """Commit the newest snapshot as a checkpoint; see ``CheckpointEngine.commit_snapshot``."""
        if self._taking is None or not self.is_on:
            return None
        return engine.commit_snapshot(self._taking, reason, deadline=deadline)

    # -- loading

    def find(self, committed: dict[str, Any] | None) -> FoundSnapshot | None:
        """The newest complete snapshot, if it is not older than the newest checkpoint; else None.

        Args:
            committed: the manifest of the newest checkpoint, on rank 0; None if there is none.
        """
        if not (self.is_on and self._loads and self._prepare()):
            return None
        try:
            return self._resume().find(committed=committed)
        except CheckpointError as error:
            logger.info("no snapshot in memory is used: %s", error)
            return None

    def load(self, found: FoundSnapshot, counters: Stateful) -> LoadedCheckpoint | None:
        """Restore all prepared objects and ``counters`` from a snapshot; None if the snapshot is damaged or does not
        fit in memory, which is logged. The objects may then be partly restored."""
        resume = self._resume()
        try:
            return resume.load(found, self._prepared.as_state(counters, {}))
        except Damaged as error:
            logger.warning("a snapshot in memory is not used: %s", error)
            resume.drop(found.key)
            return None

    def keep_only(self, found: FoundSnapshot | None) -> None:
        """Delete all earlier snapshots except ``found``, from which this attempt continues."""
        if self.is_on and self._prepare():
            self._resume().keep_only(None if found is None else found.key)

    def remove(self) -> None:
        """Delete the run's snapshots on this node, after the run's end. Not collective."""
        if self._taking is not None:
            self._taking.close()
        if self._folder is not None and self._is_local_main and self._place.run is not None:
            from hpcaccel.checkpoint_files import snapshot_folder

            snapshot_folder.remove(self._place.run.path)
        self.is_on = False

    # -- the node's folder

    @property
    def _is_local_main(self) -> bool:
        return self._group.env.local_rank == 0

    def _ranks(self) -> CheckpointRanks:
        from hpcaccel.checkpoint.rank_agreement import CheckpointRanks

        return CheckpointRanks.of(self._group)

    def _resume(self) -> SnapshotResume:
        from hpcaccel.checkpoint.snapshot_resume import SnapshotResume

        assert self._folder is not None
        return SnapshotResume(self._ranks(), self._folder, is_local_main=self._is_local_main)

    def _prepare(self) -> bool:
        """Create the node's folder, if that has not been done. Returns False, and logs why, if snapshots are not
        possible on all ranks."""
        if self._folder is not None or not self.is_on:
            return self.is_on
        from hpcaccel.checkpoint_files import snapshot_folder

        assert self._place.run is not None
        run = self._place.run.path

        def create() -> None:
            if self._prepared.save_hooks or self._prepared.load_hooks:
                raise CheckpointError("the script has save or load hooks, which write files of their own")
            if self._prepared.attached is not None:
                raise CheckpointError("DeepSpeed's engine saves the state in files of its own")
            if self._is_local_main:
                snapshot_folder.remove_stale(besides=run)
            self._folder = snapshot_folder.SnapshotFolder(run, node_name())

        try:
            self._ranks().run("no snapshots are kept in memory", create)
        except CheckpointError as error:
            self.is_on = False
            self._folder = None
            logger.info("%s", error)
        return self.is_on
