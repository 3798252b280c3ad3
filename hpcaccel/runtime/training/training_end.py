"""``TrainingEnd``: last save and outcome of a training that is stopped, finished early or completed.

| end | last save | outcome | the process |
|---|---|---|---|
| a stop, to be continued | if there is time | the reason, ``resume=True`` | exits with code 85 or 143 (see ``stop``) |
| a stop for good (``finish``) | the result, unless the trial was pruned | ``completed`` | runs the script to its end |
| the script ends, or calls ``end_training()`` | steps not saved yet | ``completed`` | exits, or continues the script |

A stop that leaves too little time for a save commits the newest snapshot in memory, if there is one.
If the script does not use the loop's methods (``SaveSchedule.is_managed``), nothing is saved when it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from hpcaccel import checkpoint_files
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.rank_logger import TRAINING_LOG
from hpcaccel.runtime.training.agreed_stop import AgreedStop
from hpcaccel.runtime.training.loop_context import LoopContext
from hpcaccel.runtime.training.save_schedule import SaveSchedule

if TYPE_CHECKING:
    from hpcaccel.core.rank_records import Outcome
    from hpcaccel.core.records import Reason
    from hpcaccel.core.stop_requests import StopRequest

__all__ = ["TrainingEnd", "refuse_second_training"]

logger = logging.getLogger(TRAINING_LOG)

_COMPLETED_AT: set[Path] = set()
"""Checkpoint directories of runs whose training this process has completed."""


def refuse_second_training(directory: Path | None) -> None:
    """Reject a second training with the same checkpoint directory.

    Raises:
        RuntimeMisuse: this process has completed a training with its checkpoints in ``directory``.
    """
    if directory in _COMPLETED_AT:
        raise RuntimeMisuse(
            f"this process has already completed a training with checkpoints in {directory}, and a second one cannot "
            "resume from them. Submit the second training as a separate job (with `after:` or `submit --from`), or "
            "loop over its loader directly and use save_state() and load_state() instead of epochs(), steps(), "
            "resume() and checkpoint()"
        )


class TrainingEnd:
    """Ends the training of this process. All ranks call its methods together, except ``abandon``.

    Args:
        stop: calls ``complete`` at the normal end of the program.
        on_finish: called at a stop for good; it must make the script's loops end.
    """

    def __init__(
        self,
        context: LoopContext,
        stop: AgreedStop,
        saves: SaveSchedule,
        *,
        on_finish: Callable[[], None],
    ) -> None:
        self._context = context
        self._saves = saves
        self._on_finish = on_finish
        self._stop = stop
        self._end: Literal["pruned", "to be continued"] | None = None

    def stop(self) -> None:
        """Carry out the stop on which all ranks have agreed.

        A training that is to be continued is saved if there is time.

        Raises:
            SystemExit: the training is to be continued. The exit code is 85, or 143 without a checkpoint directory.
        """
        request = self._stop.read_request()
        if request.then == "finish":
            self._finish(request)
            return
        if self._stop.in_time:
            self._saves.if_newer(request.reason)
        else:
            self._saves.commit_snapshot(request.reason, deadline=request.deadline)
        self._saves.wait()
        self._leave(request)

    def stop_before_start(self, newest: Path | None) -> None:
        """If any rank has received a stop before the first step, carry it out. Nothing is loaded or saved.

        Args:
            newest: the checkpoint from which the training would resume.

        Raises:
            SystemExit: as in ``stop``.
        """
        if not self._context.group.max_of(int(self._context.flag.raised)):
            return
        request = self._stop.read_request(for_save=False)
        if request.then == "finish":
            self._finish(request)
            return
        committed = [] if newest is None else checkpoint_files.committed(newest.parent)
        self._context.counters.step = self._saves.step = next(
            (item.step for item in committed if item.path == newest), 0
        )
        self._leave(request)

    def keep_result(self, reason: str) -> None:
        """Save the result, unless the trial was pruned."""
        if self._end == "pruned":
            self._saves.wait()
        else:
            self._saves.if_newer(reason)

    def complete(self) -> None:
        """Complete the training: save steps that are not saved yet if the script uses the loop's methods, write the
        outcome, and leave the process group."""
        context, checkpoints, is_managed = self._context, self._context.checkpoints, self._saves.is_managed
        context.status.phase = "leaving"
        if context.group.exchange is not None:
            context.group.exchange.watchdog.left_at = context.status.left_at
        context.metrics.flush()
        if is_managed and checkpoints.has_place and (context.counters.step > self._saves.step or checkpoints.in_flight):
            # The script left its loop by ``break``. If ranks do not arrive, they have failed: write no outcome.
            if not context.group.wait_at_exit():
                return
            self.keep_result("completed")
        checkpoints.close()
        self._context.clock.end()
        is_continued = self._end == "to be continued"
        if (
            is_managed
            and checkpoints.directory is not None
            and self._context.place.run is not None
            and not is_continued
        ):
            _COMPLETED_AT.add(checkpoints.directory)
            context.snapshots.remove()
        self._stop.complete(self._outcome("completed", resume=False))

    def abandon(self) -> None:
        """Drop the training on this rank only; no checkpoint is saved and no outcome is written."""
        self._context.metrics.flush()
        self._context.clock.end()
        self._context.checkpoints.close()
        self._stop.forget()

    def _finish(self, request: StopRequest) -> None:
        self._end = "pruned" if request.reason == "pruned" else None
        self._context.flag.clear()
        self._on_finish()

    def _leave(self, request: StopRequest) -> NoReturn:
        """Write the outcome and exit.

        Raises:
            SystemExit: always.
        """
        self._end = "to be continued"
        context, reason = self._context, request.reason
        context.status.phase = "leaving"
        if request.then == "cancel" or (request.then == "pause" and self._saves.step >= context.counters.step):
            context.snapshots.remove()
        logger.info("stopping at step %d (%s): %s", context.counters.step, reason, self._saves.saved_description())
        context.metrics.flush()
        context.clock.end()
        self._stop.leave(self._outcome(reason, resume=True), saved=context.checkpoints.has_place)

    def _outcome(self, reason: Reason, *, resume: bool) -> Outcome:
        from hpcaccel.core.rank_records import Outcome

        return Outcome(
            reason=reason,
            step=self._context.counters.step,
            checkpoint=self._saves.newest,
            resume=resume,
            first_loss=self._context.metrics.first_loss,
            last_loss=self._context.metrics.last_loss,
        )
