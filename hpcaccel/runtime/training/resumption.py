"""``Resumption``: loads the checkpoint from which a training continues, and keeps its random state for later."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.rank_logger import TRAINING_LOG
from hpcaccel.runtime.training.exactness import changes_of
from hpcaccel.runtime.training.loop_context import LoopContext

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
        self._context = context
        self._random_state: Any = None

    def load(self, path: Path, *, given: Path | None, fall_back: bool) -> ResumedCounters:
        """Restore the checkpoint ``path`` into all prepared objects. Arguments: see ``CheckpointManager.load``."""
        context, counters = self._context, self._context.counters
        loaded = context.checkpoints.load(path, counters, given=given, fall_back=fall_back)
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
        logger.info("resumed at step %d from %s, %s%s", counters.step, loaded.path, guarantee, why)
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
            resumed_from=resumed.path.name if resumed.path else None,
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
