"""What a script logs, on its way to the run's metrics and to the trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpcaccel.runtime.parallel.dtensors import full, is_dtensor

if TYPE_CHECKING:
    from hpcaccel.runtime.training.accumulation import Accumulation
    from hpcaccel.runtime.training_session import Session

__all__ = ["tell"]


def tell(
    session: Session,
    values: Mapping[str, Any],
    step: int | None,
    log_kwargs: Mapping[str, Any],
    accumulation: Accumulation,
) -> None:
    """Write numbers to the run's metrics and tell the trackers, on rank 0.

    What has no step belongs to the optimizer step that is done, or between accumulation boundaries to the one that is
    under way; never to one before what was logged already, so that a script that counts in its own way gets one axis.
    """
    if any(map(is_dtensor, values.values())):  # all ranks together: before the others leave
        values = {name: full(value) if is_dtensor(value) else value for name, value in values.items()}
    if not session.group.is_main:
        return
    loop, metrics = session.loop, session.loop.metrics
    under_way = not accumulation.is_boundary
    at = max(loop.step + under_way, metrics.logged_step or 0) if step is None else int(step)
    shown = None if step is None and at == 0 else at  # before the first step trackers number by themselves
    for tracker in session.trackers:
        tracker.log(values, step=shown, **log_kwargs.get(tracker.name, {}))
    keep = metrics.hold if step is None and under_way else metrics.write
    keep(values, step=at, epoch=loop.epoch)
