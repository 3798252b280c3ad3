"""Telling: numbers for the run's metrics and for trackers, and the end of the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcaccel.runtime.session import Session

__all__ = ["TrackFace"]


class TrackFace:
    _session: Session

    def _begin_tracking(self, log_with: Any) -> None:
        """What the constructor was told."""
        self.log_with = [] if log_with is None else log_with if isinstance(log_with, list) else [log_with]

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Write numbers to the run's metrics, on rank 0, for the current step; between accumulation boundaries nothing
        is written unless ``step`` is given."""
        session = self._session
        if session.group.is_main and (session.accumulation.is_boundary or step is not None):
            loop = session.loop
            loop.metrics.write(values, step=loop.step if step is None else step, epoch=loop.epoch)

    def end_training(self) -> None:
        """The training is over: its outcome is written, the group of ranks left. Programs that just end do so too."""
        self._session.end()
