"""Notices of a run whose batch step was killed before it could send them: sent by the program that looks at it next."""

from __future__ import annotations

import time
from collections.abc import Collection

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.launch_spec import read_launch
from hpcaccel.core.log import Mask, set_mask
from hpcaccel.core.notice_message import Notice
from hpcaccel.core.records import AttemptEnd, Reason
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.notices.outbox import Outbox
from hpcaccel.node.notices.run_events import RunEvents
from hpcaccel.node.notices.sender import Sender

__all__ = ["send_overdue_notices"]


def send_overdue_notices(run: RunDir, *, state: str, detail: str) -> int:
    """Try each notice of an ended run that is neither delivered nor given up once. Returns 0.

    Does nothing if the sender of a batch step is still at work. A line ``settled`` in the outbox says that no further
    program needs to look, until the ledger grows.

    Args:
        state: the run's state, from which the end of an attempt without an end line is told.
        detail: the sentence about it.
    """
    set_mask(Mask.of(run))
    policy = read_launch(run).notify
    outbox = Outbox(run.path, since=time.time())
    Sender(policy, _EndedRun(run, policy.events, state, detail), outbox).look(last=True)
    if outbox.held and not any(outbox.tries(notice) for notice in outbox.pending()):
        outbox.settle(run.ledger.stat().st_size)
    outbox.release()
    return 0


class _EndedRun(RunEvents):
    """The events of a run that has ended, with the end of its last attempt even if the ledger lacks it."""

    def __init__(self, run: RunDir, events: Collection[str], state: str, detail: str) -> None:
        super().__init__(run, events)
        self._state, self._detail = state, detail

    def notices(self) -> list[Notice]:
        found = super().notices()
        start = self._last.unfinished()
        if start is None:
            return found
        paused = (read_json(self._run.stop(start.attempt)) or {}).get("then") == "pause"
        reason: Reason = "stop" if paused else "cancelled" if self._state == "cancelled" else "lost"
        line = AttemptEnd(
            attempt=start.attempt,
            time=time.time(),
            job_id=start.job_id,
            reason=reason,
            decision="pause" if paused else "end",
            detail=self._detail,
        )
        return [*found, *self._ends(line, start)]
