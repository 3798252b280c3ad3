"""Notices of a run or a sweep whose batch steps were killed before they could send them. The next program that reads
the state of the run sends them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.launch_spec import read_launch
from hpcaccel.core.log import Mask, set_mask
from hpcaccel.core.notice_message import Notice, evidence_bytes
from hpcaccel.core.records import AttemptEnd, Reason
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.node.notices.outbox import Outbox
from hpcaccel.node.notices.run_events import RunEvents
from hpcaccel.node.notices.sender import Sender
from hpcaccel.node.notices.sweep_events import SweepEvents

__all__ = ["send_overdue_notices"]


def send_overdue_notices(run: RunDir, *, state: str, detail: str) -> int:
    """Try once to send each notice of an ended run or sweep that is neither delivered nor given up. Returns 0.

    Does nothing if the sender of a batch step is still running. After a line ``settled`` in the outbox, no
    program needs to read it until the ledger, or the account of a worker, grows.

    Args:
        state: the run's state, for the notice of an end that no batch step has recorded.
        detail: the sentence about it.
    """
    sweep = SweepDir(run.path)
    run = sweep if sweep.sweep.exists() else run
    set_mask(Mask.of(run))
    policy = read_launch(run).notify
    outbox = Outbox(run.path, since=time.time())
    seen = evidence_bytes(run)
    ended: RunEvents | SweepEvents = (
        _EndedSweep(sweep, policy.events, state, detail)
        if run is sweep
        else _EndedRun(run, policy.events, state, detail)
    )
    Sender(policy, ended, outbox).look(last=True)
    if outbox.held and not any(outbox.tries(notice) for notice in outbox.pending()):
        outbox.settle(seen)
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


class _EndedSweep(SweepEvents):
    """The events of a sweep that has ended, with its end even if no worker recorded one."""

    def __init__(self, sweep: SweepDir, events: Collection[str], state: str, detail: str) -> None:
        super().__init__(sweep, events)
        self._state, self._detail = state, detail

    def _end(self) -> Iterator[Notice]:
        found = list(super()._end())
        moments = [one.seen for one in self._accounts.values() if one.last is not None]
        if found or not moments:
            return iter(found)
        decision = "pause" if self._state == "paused" else "end"
        return iter([self._ended(self._state, decision, max(moments), self._detail)])
