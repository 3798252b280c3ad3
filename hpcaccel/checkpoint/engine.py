"""Checkpoint engine for one directory: save, find, load. See ``commit`` for how a save is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from hpcaccel.checkpoint.background import BackgroundWriter, PendingSave, Progress
from hpcaccel.checkpoint.guarantees import Guarantee
from hpcaccel.checkpoint.loading import (
    LoadedCheckpoint,
    find_checkpoint,
    load_checkpoint,
    replacement_of,
)
from hpcaccel.checkpoint.node_snapshots import NodeSnapshots
from hpcaccel.checkpoint.rank_agreement import CheckpointRanks
from hpcaccel.checkpoint.save_plan import AgreedPlan, PlanCache
from hpcaccel.checkpoint.saving import Branch, Retention, SaveOperation
from hpcaccel.checkpoint.snapshot_commit import write_snapshot
from hpcaccel.checkpoint.training_state import TrainingState
from hpcaccel.checkpoint_files import SavePaths
from hpcaccel.core.rank_records import Save
from hpcaccel.errors import CheckpointError, Damaged

__all__ = ["CheckpointEngine"]


class CheckpointEngine:
    """Saves, finds, loads and prunes the checkpoints in one directory. Methods are collective unless noted. ``save``,
    ``find`` and ``load`` first call ``drain``, which may raise an error.

    Args:
        directory: such as a run's ``checkpoints/``, on a file system that all ranks share. The first save creates it.
        rank: this process's rank among ``world_size``.
        group: a gloo process group; None means the default group. Not needed if ``world_size`` is 1.
        attempt: number of the run's attempt, or a name; part of the names of temporary directories.
        keep: how many committed checkpoints to keep; None keeps all. A number below 1 raises a CheckpointError.
        keep_every: also keep the first checkpoint at or after each positive multiple of this number of steps.
        local_world_size: how many ranks share this machine's memory.
        on_saved: called on rank 0 with the record of each save, after its commit.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        group: dist.ProcessGroup | None = None,
        attempt: int | str = 0,
        keep: int | None = 2,
        keep_every: int | None = None,
        local_world_size: int = 1,
        on_saved: Callable[[Save], None] | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep!r} must be at least 1, or None to keep all checkpoints")
        self.directory = Path(directory).absolute()
        self._ranks = CheckpointRanks(rank=rank, world_size=world_size, group=group)
        self._attempt = attempt
        self._retention = Retention(self.directory, keep=keep, keep_every=keep_every)
        self._on_saved = on_saved
        self._plans = PlanCache()
        self.background = BackgroundWriter(self._ranks, local_world_size=local_world_size)
        self._branch = Branch(self.directory)

    # -- saving

    def save(
        self,
        state: TrainingState,
        *,
        step: int,
        epoch: int = 0,
        reason: str = "",
        guarantee: Guarantee = "state-exact",
        guarantee_reasons: Sequence[str] = (),
        missing: Sequence[int] = (),
        fill: Callable[[Path], None] | None = None,
        background: bool = False,
    ) -> Path:
        """Write and commit ``state``, then delete old checkpoints (see ``keep``). First waits for a save in flight.

        A step that this engine has committed or loaded is not written again while its checkpoint is intact. Checkpoints
        of an abandoned branch are renamed to ``superseded_…``: one of the same step and, after a resume or a start from
        scratch, those of later steps.

        Args:
            step: number of completed optimizer steps.
            reason: ``due``, ``preempted``, ``time_limit`` …; for display.
            guarantee: what a resume on the same machines guarantees.
            guarantee_reasons: why a resume is not bit-exact.
            missing: ranks that do not take part. If there are any, only rank 0 calls ``save`` and saves its own state,
                which must be the same on all ranks. A later save of this step by all ranks replaces the checkpoint.
            fill: called on every rank that takes part. Its argument is a new directory, the same on all ranks, whose
                content becomes part of the checkpoint. ``fill`` may set ``state.without``; rank 0's value is used.
            background: return as soon as ``state`` is copied; see ``in_flight``, ``progress`` and ``settle``. Ignored
                with ``fill``, ``missing`` or attached files, and if memory for the copy or a writer process is lacking.

        Returns:
            The directory of the checkpoint, committed or in flight.

        Raises:
            CheckpointError: on all ranks that take part, if this save or the one in flight failed on any of them. The
                failed save's files are removed. An error in the background is raised by ``settle`` or ``drain``.
        """
        begun = time.monotonic()
        facts = {
            "step": step,
            "epoch": epoch,
            "reason": reason,
            "guarantee": guarantee,
            "guarantee_reasons": list(guarantee_reasons),
            "world_size": self._ranks.world_size,
            "mesh": state.mesh,
            "attempt": self._attempt,
            **({"missing_rng": list(missing)} if missing else {}),
        }
        return self._save(state, facts, fill, begun=begun, alone=bool(missing), background=background)

    def _save(
        self,
        state: TrainingState,
        facts: dict[str, Any],
        fill: Callable[[Path], None] | None,
        *,
        begun: float,
        alone: bool,
        background: bool,
    ) -> Path:
        if alone:
            self.background.wait_alone()
        else:
            self.drain()
        ranks = CheckpointRanks(rank=0, world_size=1) if alone else self._ranks
        paths = SavePaths(self.directory, facts["step"], self._attempt)
        save = SaveOperation(ranks, paths, state, facts, fill)
        self._retention.wait()  # the save may need the space
        if save.make_way(self._branch, alone=alone):
            return paths.final
        background = background and not alone and fill is None and state.attached is None
        pending = PendingSave(save.what, paths, facts["reason"], begun)
        with save.removed_on_error():
            plan, planner = save.plan(PlanCache() if alone else self._plans, background=background)
            if background and self.background.has_room(save.what, plan):
                self._start_writing(save, plan, planner, pending)
                return paths.final
            size = save.write(plan, planner, self.background.memory)
        self._branch.add(paths.step, alone=alone)
        if self._ranks.is_first:
            self._retention.apply(paths.step)
        ended = time.monotonic()
        pending.stall = ended - begun
        self._notify(pending, ended=ended, size=size)
        return paths.final

    def _start_writing(
        self, save: SaveOperation, plan: AgreedPlan, planner: DefaultSavePlanner, pending: PendingSave
    ) -> None:
        """Take the snapshot and send the order to the writer process."""
        order = save.order(plan, self._retention.rules)
        problem = None
        try:
            assert self.background.memory is not None
            order["unchanged"] = save.snapshot(plan, planner, self.background.memory)
        except Exception as error:  # the other ranks continue, and see the error when the save is settled
            problem = f"{type(error).__name__}: {error}"
        self.background.start(pending, order, plan.chunks, problem=problem)
        pending.stall = time.monotonic() - pending.begun

    def _notify(self, save: PendingSave, *, ended: float, size: int, reports: dict[str, Any] | None = None) -> None:
        if self._ranks.is_first and self._on_saved is not None:
            self._on_saved(save.record(ended=ended, size=size, reports=reports))

    def commit_snapshot(self, snapshots: NodeSnapshots, reason: str, *, deadline: float | None) -> int | None:
        """Commit the newest snapshot in memory as a checkpoint; see ``write_snapshot``. Returns its step, or None."""
        begun = time.monotonic()
        self._retention.wait()
        target = (self._branch, self.directory, self._attempt)
        written = write_snapshot(self._ranks, snapshots, *target, reason=reason, deadline=deadline)
        if written is None:
            return None
        paths, size = written
        self._branch.add(paths.step, alone=False)
        ended = time.monotonic()
        pending = PendingSave("", paths, reason, begun, stall=ended - begun, from_memory=True)
        self._notify(pending, ended=ended, size=size)
        return paths.step

    # -- the save in flight

    @property
    def in_flight(self) -> int | None:
        """The step of the background save that is not settled yet, equal on all ranks; None if there is none."""
        pending = self.background.pending
        return None if pending is None else pending.paths.step

    def progress(self) -> Progress:
        """State of the save in flight on this rank; other ranks may be ahead. Does not wait. Not collective."""
        return self.background.progress()

    def settle(self, *, failed: bool) -> None:
        """Finish the save in flight, after all ranks have detected its end.

        Args:
            failed: whether the save failed on any rank.

        Raises:
            CheckpointError: on all ranks, if the save failed. Its files are removed.
        """
        pending = self.background.pending
        assert pending is not None
        if failed:
            self.background.conclude(wait=False)
        else:
            self._settled(pending, self.background.forget())

    def drain(self) -> None:
        """Wait for the save in flight, if there is one.

        Raises:
            CheckpointError: on all ranks, if the save failed on any of them. Its files are removed.
        """
        pending = self.background.pending
        if pending is not None:
            begun = time.monotonic()
            reports = self.background.conclude(wait=True)
            pending.stall += time.monotonic() - begun
            self._settled(pending, reports)

    def _settled(self, pending: PendingSave, reports: dict[str, Any]) -> None:
        self._branch.add(pending.paths.step, alone=False)
        if self._ranks.is_first:
            self._notify(pending, ended=reports["committed"], size=reports["bytes"], reports=reports)

    def close(self) -> None:
        """Stop background work. A save in flight may be lost: call ``drain`` first. Not collective."""
        self._retention.wait()
        self.background.close()

    # -- finding and loading

    def find(self, resume: str | Path | None = "auto") -> Path | None:
        """The checkpoint to resume from. Rank 0 searches; all ranks return its result.

        Args:
            resume: ``"auto"`` for the newest good checkpoint in this directory; None to start at step 0; the name of a
                checkpoint in this directory; or the path of a checkpoint, of a directory of checkpoints or of a run. A
                run or a directory of checkpoints stands for the newest good checkpoint in it.

        Returns:
            The checkpoint's directory; None if there is none.

        Raises:
            CheckpointError: on all ranks, if all checkpoints are damaged, or the named one is missing or unreadable.
        """
        self.drain()
        if resume is None:
            self._branch.start_anew()
            return None
        return self._ranks.first(f"cannot resume from {resume}", lambda: find_checkpoint(self.directory, resume))

    def has_made(self, path: Path) -> bool:
        """Whether this engine has saved or loaded ``path``. Only rank 0 has the complete list. Not collective."""
        return self._branch.contains(path)

    def load(self, path: Path, state: TrainingState, *, fall_back: bool = True) -> LoadedCheckpoint:
        """Restore ``state`` in place and check the CRCs of what is read. An error may leave ``state`` partly restored.

        Args:
            path: a checkpoint's directory, the same on all ranks.
            fall_back: if the checkpoint is damaged and in this engine's directory, rename it to ``quarantined_…`` and
                load the newest good one that remains.

        Raises:
            CheckpointError: on all ranks, if a checkpoint is unreadable, of another model, or damaged with no fallback.
        """
        self.drain()
        path = Path(path).absolute()
        while True:
            try:
                loaded = load_checkpoint(self._ranks, path, state)
                break
            except Damaged as error:
                if not fall_back or path.parent != self.directory:
                    raise
                path = self._ranks.first("cannot resume", partial(replacement_of, path, error))
        if path.parent == self.directory:
            self._branch.resume(loaded.step, alone="missing_rng" in loaded.manifest)
        return loaded
