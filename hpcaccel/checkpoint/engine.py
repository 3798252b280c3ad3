"""Saving and loading as one move of all ranks: a checkpoint is there whole, or it is not there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import commit, manifest_writer
from hpcaccel.checkpoint.background import Background, Job, Progress
from hpcaccel.checkpoint.dcp_planners import Planned, SavePlanning
from hpcaccel.checkpoint.loading import Guarantee, LoadedCheckpoint, load_all
from hpcaccel.checkpoint.rank_agreement import Damaged, Ranks
from hpcaccel.checkpoint.saving import PlannedSave
from hpcaccel.checkpoint.training_state import TrainingState
from hpcaccel.core.records import Save
from hpcaccel.errors import CheckpointError

__all__ = ["CheckpointEngine", "Guarantee", "LoadedCheckpoint"]

log = logging.getLogger(__name__)


class CheckpointEngine:
    """Saves, finds, loads and prunes the checkpoints in one directory. Every method is called by all ranks together.

    Args:
        directory: a run's ``checkpoints/``; made at the first save. All ranks must see the same file system.
        rank: this process's number among ``world_size``.
        group: the process group to talk through, one of gloo; None means the default group. Neither is needed when
            ``world_size`` is 1.
        attempt: names the temporary directory of a save.
        keep: how many committed checkpoints stay, at least 1; None keeps all.
        keep_every: besides these, the first of every so many steps stays for good.
        local_world_size: how many ranks share this machine's memory.
        on_saved: called on rank 0 when it is known that a checkpoint is committed.
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
            raise CheckpointError(f"keep is {keep}: at least 1 checkpoint must stay, or None to keep all")
        self.directory = Path(directory).absolute()
        self._ranks = Ranks(rank=rank, world_size=world_size, group=group)
        self._attempt = attempt
        self._keep = keep
        self._keep_every = keep_every
        self._on_saved = on_saved
        self._planning = SavePlanning()
        self._background = Background(self._ranks, local_world_size=local_world_size)
        self._deletion: threading.Thread | None = None
        """Of old checkpoints, on rank 0."""
        self._room_for: Planned | None = None
        """The plan for which it was last asked whether snapshots fit, and the answer."""
        self._fits = False
        self._stall = 0.0
        """How long the training waited for the snapshot of the save under way."""
        self._own_steps: set[int] = set()
        """What this training has saved here, or resumed from: committed and never written again."""
        self._lone_steps: set[int] = set()
        """What rank 0 has saved without the others."""
        self._base_step: int | None = None
        """Where this training stands, once it has resumed (0: it started anew). Checkpoints of later steps that are
        found then belong to a course that was given up."""

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
        """Write and commit ``state``, then delete checkpoints that are too many.

        When this engine has committed or loaded this step already, its path is returned and nothing is written. What
        another course of training has left here under the same step is renamed to ``superseded_…``; and so are later
        steps, when this engine has loaded an older one or was told to ``find(None)``.

        Args:
            step: optimizer steps done.
            reason: why now: ``due``, ``preempted``, ``time_limit`` …; for people.
            guarantee: what the training promises when it goes on from here on the same machines.
            guarantee_reasons: why it promises no more.
            missing: ranks that do not take part, where not all have come. Then rank 0 alone calls and saves what it
                holds: only for state that is the same on all ranks. The manifest names those whose random state it
                does not have. When all ranks save this step afterwards, theirs takes its place.
            fill: called on every rank with an empty directory, whose content becomes part of the checkpoint. It may set
                ``state.without``, of which rank 0's counts: hooks often decide on the main process only.
            background: come back when ``state`` has been copied; see ``in_flight``, ``progress`` and ``settle`` for
                what comes then. Where the memory for the copy is missing, or with ``fill`` or ``missing``, it is
                written before this returns. A save under way is waited for first.

        Returns:
            The directory of the committed checkpoint, or of the one that is under way.

        Raises:
            CheckpointError: on all ranks, when anything failed on any of them. Nothing is left of the attempt.
        """
        begun = time.monotonic()
        facts: dict[str, Any] = {
            "step": step,
            "epoch": epoch,
            "reason": reason,
            "guarantee": guarantee,
            "guarantee_reasons": list(guarantee_reasons),
            "world_size": self._ranks.world_size,
            "mesh": state.mesh,
            "attempt": self._attempt,
        }
        if missing:
            facts["missing_rng"] = list(missing)
            self._background.wait_alone()
        else:
            self.drain()
        ranks = Ranks(rank=0, world_size=1) if missing else self._ranks
        save = PlannedSave(ranks, self.directory, self._attempt, state, facts, fill)
        if save.first(lambda: self._make_way(step, save.final, alone=bool(missing))):
            return save.final
        planning = SavePlanning() if missing else self._planning
        with save.undone_on_error():
            background = background and not missing and fill is None
            planned, planner = save.plan(planning, self._background.memory, background=background)
            if background and self._in_background(save, planned, planner, begun):
                return save.final
            save.write(planned, planner)
        self._committed(step, alone=bool(missing))
        if self._ranks.is_first:
            self._prune(step)
        self._tell(step, reason, begun, time.monotonic(), stall=time.monotonic() - begun, size=save.bytes)
        return save.final

    @property
    def in_flight(self) -> int | None:
        """The step whose save is under way in the background, the same on all ranks; None when there is none."""
        job = self._background.job
        return None if job is None else job.step

    def progress(self) -> Progress:
        """How far this rank is with the save under way; the ranks may be so at different times. No rank waits."""
        return self._background.progress()

    def settle(self, *, failed: bool) -> None:
        """All ranks know that the save under way is over: take note of it.

        Args:
            failed: on some rank.

        Raises:
            CheckpointError: on all ranks, if it failed. Nothing is left of it.
        """
        if failed:
            self._background.conclude(wait=False)
        else:
            self._settled(self._background.job, self._background.forget())

    def drain(self) -> None:
        """Wait for the save under way, if there is one.

        Raises:
            CheckpointError: on all ranks, when it failed on any of them. Nothing is left of it.
        """
        job = self._background.job
        if job is not None:
            begun = time.monotonic()
            told = self._background.conclude(wait=True)
            self._settled(job, told, waited=time.monotonic() - begun)

    def close(self) -> None:
        """End what works in the background. A save that is under way is lost: ``drain`` first. One rank or all call."""
        self._wait_for_deletion()
        self._background.close()

    def find(self, resume: str | Path | None = "auto") -> Path | None:
        """The checkpoint to go on from; rank 0 looks, all ranks get its answer.

        Args:
            resume: ``"auto"``: the newest good one of this directory. None: none, training starts anew. Else the
                name of a checkpoint here, or the path of a checkpoint, of a directory of them or of a run, whose
                newest good one is taken.

        Returns:
            The checkpoint's directory, or None where there is nothing to go on from.

        Raises:
            CheckpointError: there are only damaged ones, or what was named is not there.
        """
        self.drain()
        if resume is None:
            self._base_step = 0
            return None
        return self._ranks.first(f"cannot resume from {resume}", lambda: self._find(resume))

    def has_made(self, path: Path) -> bool:
        """Whether this engine has saved ``path``; only rank 0 knows of all."""
        steps = self._own_steps | self._lone_steps
        return any(path == self.directory / checkpoint_files.checkpoint_name(step) for step in steps)

    def load(self, path: Path, state: TrainingState, *, fall_back: bool = True) -> LoadedCheckpoint:
        """Restore ``state`` in place, every byte checked.

        When it fails, ``state`` may be restored in part.

        Args:
            path: a checkpoint's directory, the same on all ranks.
            fall_back: when the checkpoint is damaged and one of this engine's directory, rename it to
                ``quarantined_…`` and load the newest good one that is left.

        Raises:
            CheckpointError: on all ranks: the checkpoint is damaged and no good one is left, it is of another model, or
                it could not be read.
        """
        self.drain()
        path = Path(path).absolute()
        while True:
            try:
                loaded = load_all(self._ranks, path, state)
            except Damaged as error:
                if not fall_back or path.parent != self.directory:
                    raise
                path = self._quarantine(path, error)
            else:
                break
        if path.parent == self.directory:
            self._base_step = loaded.step
            incomplete = "missing_rng" in loaded.manifest
            (self._lone_steps if incomplete else self._own_steps).add(loaded.step)
        return loaded

    # -- saving

    def _in_background(self, save: PlannedSave, planned: Planned, planner: DefaultSavePlanner, begun: float) -> bool:
        """Take the snapshot and hand it to the writer; False where this save must be waited for."""
        if not self._has_room(save.what, planned):
            return False
        job = save.job(planned, begun, prune=self._pruning(save.step))
        try:
            save.writer(self._background.memory).snapshot(planned.own, planner)
            index = planned.index if self._ranks.is_first else b""
        except Exception as error:  # the others go on: they hear of it where all hear of a writer's errors
            self._background.give_up(job, f"{type(error).__name__}: {error}")
        else:
            self._background.start(job, index)
        self._stall = time.monotonic() - begun
        return True

    def _has_room(self, what: str, planned: Planned) -> bool:
        """Whether snapshots of this plan fit; asked once for a plan."""
        if self._room_for is not planned:
            self._room_for = planned
            refusal = self._background.refusal(what, planned.file_bytes)
            self._fits = refusal is None
            if refusal is not None and self._ranks.is_first:
                log.warning("checkpoints are not written in the background, training waits for them: %s", refusal)
        return self._fits

    def _settled(self, job: Job | None, told: dict[str, Any] | None, *, waited: float = 0.0) -> None:
        assert job is not None
        self._committed(job.step, alone=False)
        if self._ranks.is_first:
            assert told is not None
            stall = self._stall + waited
            self._tell(job.step, job.reason, job.begun, told["committed"], stall=stall, size=told["bytes"], later=True)

    def _committed(self, step: int, *, alone: bool) -> None:
        (self._lone_steps if alone else self._own_steps).add(step)
        if self._base_step is not None:
            self._base_step = step

    def _tell(
        self, step: int, reason: str, begun: float, ended: float, *, stall: float, size: int, later: bool = False
    ) -> None:
        if self._ranks.is_first and self._on_saved is not None:
            self._on_saved(
                Save(
                    step=step,
                    reason=reason,
                    stall_seconds=stall,
                    seconds=ended - begun,
                    bytes=size,
                    background=later,
                    time=time.time(),
                )
            )

    def _pruning(self, step: int) -> dict[str, Any] | None:
        """What ``commit.prune`` is told after the commit of ``step``; None: nothing is to be deleted."""
        if self._keep is None:
            return None
        return {"keep": self._keep, "keep_every": self._keep_every, "newest_step": step}

    def _prune(self, step: int) -> None:
        """Old ones lose their names now. To delete large files takes a disk a while, for which no training waits."""
        arguments = self._pruning(step)
        doomed = commit.retire(self.directory, **arguments) if arguments is not None else []
        if doomed:
            self._deletion = threading.Thread(target=commit.delete, args=(doomed,), name="checkpoint-deletion")
            self._deletion.start()

    def _wait_for_deletion(self) -> None:
        if self._deletion is not None:
            self._deletion.join()
            self._deletion = None

    def _make_way(self, step: int, final: Path, *, alone: bool) -> bool:
        """On rank 0, before a save. True when this step is committed already and stays as it is."""
        self._wait_for_deletion()  # what it frees may be needed
        if step in self._lone_steps and not alone:
            self._lone_steps.discard(step)  # what all ranks save takes its place
        commit.clean(self.directory)
        for other, path in checkpoint_files.step_directories(self.directory):
            if self._is_given_up(other, now=step):
                kept = commit.set_aside(path, checkpoint_files.SUPERSEDED)
                log.warning("%s is not of this course of training and now called %s", path.name, kept.name)
        if not final.exists():
            return False
        try:
            manifest_writer.read(final)
        except Damaged as error:
            commit.quarantine(final, str(error))
            return False
        return True

    def _is_given_up(self, step: int, *, now: int) -> bool:
        if step in self._own_steps or step in self._lone_steps:
            return False
        return step == now or (self._base_step is not None and step > self._base_step)

    # -- loading

    def _find(self, resume: str | Path) -> Path | None:
        if resume == "auto":
            return self._newest_good(self.directory)
        for path in (self.directory / resume, Path(resume).absolute()):
            for place in (path, path / "checkpoints"):
                if (place / checkpoint_files.MANIFEST).exists():
                    return place
                if checkpoint_files.step_directories(place):
                    return self._newest_good(place)
        here = ", ".join(checkpoint.name for checkpoint in checkpoint_files.committed(self.directory)) or "none"
        raise CheckpointError(f"no checkpoint is there (in {self.directory}: {here})")

    def _newest_good(self, directory: Path) -> Path | None:
        """
        Raises:
            CheckpointError: there have been checkpoints, but none is good: starting anew would lose the training.
        """
        path = commit.newest_good(directory, ours=directory == self.directory)
        if path is None and (bad := commit.damaged(directory)):
            names = ", ".join(item.name for item in bad)
            raise CheckpointError(
                f"no good checkpoint is left in {directory}, only damaged ones: {names}. "
                "To start from step 0 all the same, move them away or set checkpoint.resume to never"
            )
        return path

    def _quarantine(self, path: Path, error: Damaged) -> Path:
        def next_one() -> Path | None:
            if path.exists():
                commit.quarantine(path, str(error))
            return self._newest_good(self.directory)

        found = self._ranks.first("cannot resume", next_one)
        if found is None:
            raise error
        return found
