"""The sender: a child process of the batch step that delivers the notices of a run or a sweep to the user's webhook.

It looks for new events once a second, and ends once its standard input is closed: after a last look, or when the batch
step kills it. It ignores the signals that Slurm sends to the job. If another sender holds the outbox, it waits.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from typing import Protocol

from hpcaccel.core.launch_spec import NoticePolicy, read_launch
from hpcaccel.core.log import Mask, set_mask
from hpcaccel.core.notice_message import Notice, message_of
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import WorkerDir
from hpcaccel.errors import HpcaccelError, UserError
from hpcaccel.node.notices.outbox import MOST_TRIES, Outbox
from hpcaccel.node.notices.run_events import RunEvents
from hpcaccel.node.notices.sweep_events import SweepEvents

__all__ = ["Sender", "deliver_now", "send_notices"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
IDLE_LOOK_SECONDS = 60.0
"""Interval of the search for idle GPUs."""
PAUSES_SECONDS = (2.0, 10.0, 30.0, 120.0, 300.0, 600.0, 1200.0)
"""Pauses after one, two, … requests in a row without success."""


class Events(Protocol):
    """Where notices come from: ``RunEvents`` or ``SweepEvents``."""

    def notices(self) -> list[Notice]: ...

    def idle_gpus(self, known: dict[str, Notice]) -> list[Notice]: ...


def send_notices(run: RunDir, *, since: float) -> int:
    """Deliver the notices of ``run``, or of the sweep whose worker it is, until standard input is closed. Returns 0.

    Args:
        since: see ``Outbox``.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(19)
    set_mask(Mask.of(run))
    sender = Sender.of(run, since=since)
    closing = False
    while not closing:
        closing = bool(select.select([sys.stdin], [], [], LOOK_SECONDS)[0])
        sender.look(last=closing)
    while not sender.done:  # another sender holds the outbox, and may be about to end; the batch step ends this wait
        time.sleep(LOOK_SECONDS / 5)
        sender.look(last=True)
    return 0


def deliver_now(run: RunDir, *, since: float) -> None:
    """Deliver the pending notices of ``run`` once, for programs that are about to end."""
    if read_launch(run).notify.sends:
        Sender.of(run, since=since).look(last=True)


class Sender:
    """Delivers notices to the webhook of ``policy``."""

    def __init__(self, policy: NoticePolicy, events: Events, outbox: Outbox) -> None:
        self._policy, self._events, self._outbox = policy, events, outbox
        self._again = 0.0
        self._failures = 0
        self._idle_look = time.monotonic() + IDLE_LOOK_SECONDS
        self._problem = ""
        self.done = False
        """Whether the last look has been made."""

    @classmethod
    def of(cls, run: RunDir, *, since: float) -> Sender:
        policy = read_launch(run).notify
        if run.is_worker:
            sweep = WorkerDir(run.path).sweep
            return cls(policy, SweepEvents(sweep, policy.events), Outbox(sweep.path, since=since))
        return cls(policy, RunEvents(run, policy.events), Outbox(run.path, since=since))

    def look(self, *, last: bool = False) -> None:
        """Record new events, and send what is due. Errors are logged once each.

        Args:
            last: try each pending notice now, because no sender may run again for a long time.
        """
        try:
            if not self._outbox.acquire():
                return
            self._outbox.flush()
            for notice in self._new():
                self._outbox.add(notice)
            if last or time.monotonic() >= self._again:
                self._send(last=last)
            self.done = last
        except (OSError, HpcaccelError) as error:
            self._report(f"cannot send notices: {error}")
            self.done = last

    def _new(self) -> list[Notice]:
        found = self._events.notices()
        if time.monotonic() >= self._idle_look:
            self._idle_look = time.monotonic() + IDLE_LOOK_SECONDS
            found = [*found, *self._events.idle_gpus(self._outbox.notices)]
        return found

    def _send(self, *, last: bool) -> None:
        from hpcaccel.core.webhook import find_url, post

        for notice in self._outbox.pending():
            try:
                url = find_url(self._policy)
            except UserError as error:
                self._report(f"cannot send the notice {notice.key}: {error}")
                self._pause()
                return
            message = message_of(notice, repeated=self._outbox.is_uncertain(notice))
            self._outbox.trying(notice)
            answer = post(url, message, identifier=notice.id)
            self._outbox.result(
                notice, delivered=answer.delivered, final=answer.final, status=answer.status, answer=answer.text
            )
            if answer.delivered:
                self._failures, self._again, self._problem = 0, 0.0, ""
                log.info("notice %s delivered", notice.key)
                continue
            how = f"HTTP {answer.status}: {answer.text}" if answer.status is not None else answer.text
            self._report(f"the notice {notice.key} was not delivered: {how}{self._outlook(notice, final=answer.final)}")
            if not answer.final:
                self._pause()
                return

    def _outlook(self, notice: Notice, *, final: bool) -> str:
        if final:
            return ". It is not sent again: check the webhook with `hpcaccel notify --test`"
        return f" (try {self._outbox.tries(notice)} of {MOST_TRIES})"

    def _pause(self) -> None:
        self._again = time.monotonic() + PAUSES_SECONDS[min(self._failures, len(PAUSES_SECONDS) - 1)]
        self._failures += 1

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log.warning(problem)
