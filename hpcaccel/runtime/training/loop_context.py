"""``LoopContext``, the objects that the parts of the training loop share; ``Counters``, its saved state; and
``LoopActivity``, its report to the heartbeat."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hpcaccel.runtime.data.loaders_in_use import LoadersInUse
from hpcaccel.runtime.distributed.device_backend import uuid_of
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.health.heartbeat import Activity, RankStatus
from hpcaccel.runtime.rank_logger import TRAINING_LOG
from hpcaccel.runtime.settings import OutputLocation, Settings
from hpcaccel.runtime.stop_flag import StopFlag
from hpcaccel.runtime.training.attempt_timing import AttemptClock
from hpcaccel.runtime.training.exactness import Exactness
from hpcaccel.runtime.training.metrics_writer import MetricsWriter

if TYPE_CHECKING:
    from hpcaccel.runtime.checkpointing.checkpoint_manager import CheckpointManager
    from hpcaccel.runtime.checkpointing.prepared_objects import PreparedObjects
    from hpcaccel.runtime.checkpointing.snapshot_manager import SnapshotManager
    from hpcaccel.runtime.health.stragglers import OwnTime

__all__ = ["Counters", "LoopActivity", "LoopContext"]

logger = logging.getLogger(TRAINING_LOG)


class Counters:
    """Completed steps and epochs, and other state of the loop that is part of every checkpoint."""

    def __init__(self, metrics: MetricsWriter) -> None:
        self.step = 0
        self.epoch = 0
        self.threads = torch.get_num_threads()
        """Number of torch threads when the loaded checkpoint was saved; without a checkpoint, the number in this
        process."""
        self._metrics = metrics

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self.epoch,
            "first_loss": self._metrics.first_loss,
            "last_loss": self._metrics.last_loss,
            "logged_step": self._metrics.logged_step,
            "threads": torch.get_num_threads(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.epoch = state["step"], state["epoch"]
        self._metrics.resume(state)
        self.threads = state["threads"]


@dataclass(frozen=True)
class LoopContext:
    """The objects that the parts of one training loop share."""

    place: OutputLocation
    """The run directory, the attempt, the checkpoint directory and the metrics file."""
    group: RankGroup
    settings: Settings
    prepared: PreparedObjects
    in_use: LoadersInUse
    flag: StopFlag
    clock: AttemptClock
    metrics: MetricsWriter
    counters: Counters
    exactness: Exactness
    checkpoints: CheckpointManager
    snapshots: SnapshotManager
    own_time: OwnTime | None
    """Measures this rank's own time per step; None for a single process."""
    status: RankStatus = field(default_factory=RankStatus)
    _logged: set[str] = field(default_factory=set)

    @classmethod
    def create(
        cls,
        place: OutputLocation,
        group: RankGroup,
        settings: Settings,
        *,
        prepared: PreparedObjects,
        in_use: LoadersInUse,
        flag: StopFlag,
        clock: AttemptClock,
    ) -> LoopContext:
        """Create the context of a session's loop."""
        from hpcaccel.runtime.checkpointing.checkpoint_manager import CheckpointManager
        from hpcaccel.runtime.checkpointing.snapshot_manager import SnapshotManager
        from hpcaccel.runtime.health.stragglers import OwnTime

        metrics = MetricsWriter(place.metrics if group.is_main else None, attempt=place.attempt)
        own_time = OwnTime.of(group, settings)
        in_use.own_time = own_time if own_time is not None and own_time.until_batch else None
        return cls(
            place=place,
            group=group,
            settings=settings,
            prepared=prepared,
            in_use=in_use,
            flag=flag,
            clock=clock,
            metrics=metrics,
            counters=Counters(metrics),
            exactness=Exactness(settings=settings, prepared=prepared, in_use=in_use, device=group.device),
            checkpoints=CheckpointManager(place, group, settings, prepared),
            snapshots=SnapshotManager(place, group, settings, prepared),
            own_time=own_time,
        )

    def log_once(self, text: str) -> None:
        """Log a line on rank 0, unless this training has logged it before."""
        if text not in self._logged:
            self._logged.add(text)
            logger.info("%s", text)


class LoopActivity:
    """Reports to the heartbeat what the loop is doing.

    Args:
        evaluates: returns whether the script is iterating over a loader that is not trained on.
    """

    stack_counts = False

    def __init__(self, context: LoopContext, evaluates: Callable[[], bool]) -> None:
        self.own_time = context.own_time
        self._context = context
        self._evaluates = evaluates
        self._gpu = uuid_of(context.group.device)

    def activity(self) -> Activity:
        context, status = self._context, self._context.status
        exchange = context.group.exchange
        watchdog = None if exchange is None else exchange.watchdog
        return Activity(
            phase="evaluating" if status.phase == "training" and self._evaluates() else status.phase,
            step=context.counters.step,
            first_step=status.first_step,
            batches=context.in_use.batches,
            calls=0 if watchdog is None else sum(list(watchdog.entered.values())),
            waits_in=None if watchdog is None else watchdog.waits_in,
            left=status.left_at,
            gpu=self._gpu,
        )
