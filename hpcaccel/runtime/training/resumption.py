"""``Resumption``: loads the checkpoint from which a training continues, and keeps its random state for later."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpcaccel import checkpoint_files
from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.rank_logger import TRAINING_LOG
from hpcaccel.runtime.training.exactness import changes_of
from hpcaccel.runtime.training.loop_context import LoopContext

if TYPE_CHECKING:
    from hpcaccel.checkpoint import LoadedCheckpoint

__all__ = ["ResumedCounters", "Resumption"]

logger = logging.getLogger(TRAINING_LOG)


@dataclass(frozen=True)
class ResumedCounters:
    """Where this training starts: the numbers of completed steps and epochs, and the path of the loaded checkpoint
    (None if the training starts at step 0)."""

    step: int
    epoch: int
    path: Path | None


class Resumption:
    """Loads the checkpoint from which this training continues."""

    def __init__(self, context: LoopContext) -> None:
        self.resumed: ResumedCounters | None = None
        """None until ``resume()`` or ``load_state()`` is called."""
        self.in_mid_epoch = False
        """Whether a loader was in the middle of its data at the save. If so, it restores the generators on resume."""
        self.was_saved_by_script = False
        """Whether the checkpoint was made by ``save_state()``, not by the loop."""
        self.committed_step = 0
        """Step of the newest checkpoint when the training was resumed."""
        self._context = context
        self._from_memory = False
        self._random_state: Any = None

    def load(self, path: Path, *, given: Path | None = None, fall_back: bool = True) -> ResumedCounters:
        """Restore the checkpoint ``path`` into all prepared objects. Arguments: see ``CheckpointManager.load``."""
        context = self._context
        loaded = context.checkpoints.load(path, context.counters, given=given, fall_back=fall_back)
        self.committed_step = loaded.step
        return self._continue_from(loaded, str(loaded.path))

    def restore(self, path: Path | None, *, or_newer: bool, **options: Any) -> ResumedCounters:
        """Restore ``path``, or with ``or_newer`` a newer snapshot in memory. ``options`` are those of ``load``."""
        return self.newest(path) if or_newer or path is None else self.load(path, **options)

    def newest(self, path: Path | None) -> ResumedCounters:
        """Restore the newest state of the run: a snapshot in memory, else the checkpoint ``path``, else start at step
        0.

        Raises:
            CheckpointError: on all ranks, if a snapshot cannot be loaded and there is no checkpoint: the objects may be
                partly restored. The next attempt starts at step 0.
        """
        snapshots = self._context.snapshots
        is_main = self._context.group.is_main
        committed = checkpoint_files.read_manifest(path) if path is not None and is_main else None
        while (found := snapshots.find(committed)) is not None:
            loaded = snapshots.load(found, self._context.counters)
            if loaded is not None:
                snapshots.keep_only(found)
                self.committed_step = self._context.group.from_main(int((committed or {"step": 0})["step"]))
                self._from_memory = True
                moved = f", {found.moved} of its parts from other nodes" if found.moved else ""
                return self._continue_from(loaded, f"memory{moved}")
            if path is None:
                raise CheckpointError("a snapshot in memory is unusable, and there is no checkpoint: restart the ranks")
        resumed = self.start_at_zero() if path is None else self.load(path)
        snapshots.keep_only(None)
        return resumed

    def _continue_from(self, loaded: LoadedCheckpoint, where: str) -> ResumedCounters:
        """Restore the random state of a loaded checkpoint, and log it."""
        context, counters = self._context, self._context.counters
        if context.settings.deterministic and context.group.device.type == "cpu":
            torch.set_num_threads(counters.threads)
        self._random_state = context.checkpoints.random_state(loaded)
        self.in_mid_epoch = any(loader.state_dict()["running"] for loader in context.prepared.loaders)
        context.checkpoints.restore_rng(self._random_state)
        self.was_saved_by_script = loaded.manifest["reason"] == "save_state"
        self.resumed = ResumedCounters(counters.step, counters.epoch, loaded.path)
        reasons, guarantee = loaded.differences, loaded.guarantee
        if guarantee == "bit-exact" and (changes := changes_of(context.prepared.loaders)):
            reasons, guarantee = changes, "state-exact"
        why = f" ({'; '.join(reasons)})" if reasons else ""
        logger.info("resumed at step %d from %s, %s%s", counters.step, where, guarantee, why)
        context.clock.loaded(counters.step)
        if loaded.random_states:
            logger.info("random states: %s", loaded.random_states)
        return self.resumed

    def start_at_zero(self) -> ResumedCounters:
        """Start at step 0, because there is no checkpoint."""
        self.resumed = ResumedCounters(0, 0, None)
        self._context.clock.loaded(0)
        if self._context.checkpoints.has_place:
            logger.info("starting at step 0: no checkpoint to resume from")
        return self.resumed

    def restore_rng(self) -> None:
        """Set the random generators to their state in the checkpoint once more, because code run since the load may
        have drawn from them. Later calls do nothing."""
        if self._random_state is not None:
            self._context.checkpoints.restore_rng(self._random_state)
            self._random_state = None

    def write_progress(self, resumed: ResumedCounters, total_steps: int | None) -> None:
        """On rank 0, write to ``progress.json`` where this attempt resumes, and the total number of steps if known."""
        self._context.clock.begin(
            resumed_step=resumed.step,
            resumed_from="memory" if self._from_memory else resumed.path.name if resumed.path else None,
            total_steps=total_steps,
        )

    def check_that_loaded(self, *, is_managed: bool) -> None:
        """At the first step, check that the run's checkpoint was loaded, if there is one.

        Args:
            is_managed: whether the script uses the loop's methods. If not, an unused checkpoint is only logged.

        Raises:
            RuntimeMisuse: the script uses these methods but has not loaded the checkpoint.
        """
        path = self._context.checkpoints.find() if self.resumed is None else None
        if path is None or self._context.checkpoints.has_made(path):
            return
        if is_managed:
            raise RuntimeMisuse(
                f"this run has a checkpoint ({path}), but the script trains from the start. Call accelerator.resume() "
                "after prepare() (epochs() and steps() call it too), or set checkpoint.resume to never"
            )
        logger.info(
            "this run has a checkpoint (%s), but the script trains from the start. To load the checkpoint, call "
            "accelerator.load_state() without a path",
            path,
        )
