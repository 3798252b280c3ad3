"""What host and chooser tell each other: a JSON object a line, on the chooser's standard input and output."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hpcaccel.core.records import from_dict
from hpcaccel.errors import HpcaccelError

__all__ = ["Ended", "Event", "Hello", "Host", "HostGone", "Stopping", "take_over_stdout"]

PIECE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The first word of the host's: what this worker has. Times are seconds since the epoch."""

    worker: int
    job_id: str
    restart_count: int = 0
    end_time: float | None = None
    """When the scheduler takes the allocation back, where that is known."""
    slots: int = 1
    gpus: int = 0
    running: dict[str, int] = field(default_factory=dict)
    """Trials that run already, by slot: of a chooser that has died."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A trial's ranks have left, and its supervisor has written why."""

    trial: int
    reason: str
    decision: str
    error_class: str | None = None
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """Nothing new may start; what runs is being stopped by the host."""

    reason: str
    then: str = ""


Event = Hello | Ended | Stopping
_KINDS: dict[str, type[Event]] = {"hello": Hello, "ended": Ended, "stopping": Stopping}


class HostGone(HpcaccelError):
    """The host has closed its end: whatever runs is no longer this chooser's."""


class Host:
    """The other end of the line.

    Args:
        source, sink: file descriptors.
    """

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._torn = b""
        self._waiting: list[Event] = []
        """What was said before somebody listened to it."""

    def welcome(self) -> Hello:
        """The host's first word.

        Raises:
            HostGone: it has none.
        """
        while True:
            events = list(self._read(None))
            for index, event in enumerate(events):
                if isinstance(event, Hello):
                    self._waiting = events[index + 1 :]
                    return event

    def run(self, trial: int, *, slot: int) -> None:
        """Start a trial, whose directory is written."""
        self._say({"run": trial, "slot": slot})

    def end(self, why: str, *, then: str = "") -> None:
        """There is nothing more to do for this worker; with ``requeue``, not before it comes back with fresh time."""
        self._say({"end": True, "why": why, "then": then})

    def _say(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._sink, data) :]
        except BrokenPipeError:
            raise HostGone("the host has gone") from None

    def hear(self, seconds: float) -> list[Event]:
        """What the host has said, after waiting for so long at most.

        Raises:
            HostGone: it will say nothing any more.
        """
        events, self._waiting = self._waiting, []
        return events or list(self._read(seconds))

    def _read(self, seconds: float | None) -> Iterator[Event]:
        if not select.select([self._source], [], [], seconds)[0]:
            return
        data = os.read(self._source, PIECE_BYTES)
        if not data:
            raise HostGone("the host has gone")
        *lines, self._torn = (self._torn + data).split(b"\n")
        for line in lines:
            value = json.loads(line)
            kind = _KINDS.get(value.get("event", ""))
            if kind is not None:  # a newer host may say more
                yield from_dict(kind, value)


def take_over_stdout() -> int:
    """Keep standard output for the conversation; whatever prints to it by mistake goes to standard error. The
    descriptor to speak on."""
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    return ours
