"""Messages between a worker and its tuner: JSON lines on the tuner's standard input and output."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hpcaccel.core.durable_files import LineSplitter, json_line, write_all
from hpcaccel.core.records import from_dict
from hpcaccel.errors import HpcaccelError

__all__ = ["Ended", "Event", "Hello", "StopTrials", "WorkerConnection", "WorkerGone"]

PIECE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The worker's first message: its resources. Times are seconds since the epoch."""

    worker: int
    job_id: str
    restart_count: int = 0
    end_time: float | None = None
    """When the allocation ends; None if unknown."""
    slots: int = 1
    gpus: int = 0
    running: dict[str, int] = field(default_factory=dict)
    """Numbers of the trials already running, by slot: an earlier tuner, which has died, started them."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Message that a trial has ended, with the reason and the supervisor's decision."""

    trial: int
    reason: str
    decision: str
    error_class: str | None = None
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StopTrials:
    """Message that no further trial may start. The worker also stops the running trials, unless its request lets
    them finish."""

    reason: str
    then: str = ""


Event = Hello | Ended | StopTrials
_KINDS: dict[str, type[Event]] = {"hello": Hello, "ended": Ended, "stopping": StopTrials}


class WorkerGone(HpcaccelError):
    """The worker has closed the connection: running trials no longer belong to this tuner."""


class WorkerConnection:
    """The tuner's connection to its worker.

    Args:
        source: file descriptor to read from.
        sink: file descriptor to write to.
    """

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._lines = LineSplitter()
        self._waiting: list[Event] = []
        """Messages received together with ``Hello``."""

    @classmethod
    def on_stdio(cls) -> WorkerConnection:
        """Connect through standard input and output. Whatever else is written to standard output goes to standard
        error."""
        sys.stdout.flush()
        sink = os.dup(1)
        os.dup2(2, 1)
        return cls(0, sink)

    def receive_hello(self) -> Hello:
        """Wait for the worker's first message.

        Raises:
            WorkerGone: the worker has closed the connection.
        """
        while True:
            events = list(self._read(None))
            for index, event in enumerate(events):
                if isinstance(event, Hello):
                    self._waiting = events[index + 1 :]
                    return event

    def run(self, trial: int, *, slot: int) -> None:
        """Request the start of a trial whose directory has been written."""
        self._send({"run": trial, "slot": slot})

    def end(self, why: str, *, then: str = "") -> None:
        """Report that there are no more trials for this worker. With ``then="requeue"``, this holds only until the
        worker's job has been requeued."""
        self._send({"end": True, "why": why, "then": then})

    def _send(self, value: dict[str, Any]) -> None:
        try:
            write_all(self._sink, json_line(value))
        except BrokenPipeError:
            raise WorkerGone("the worker has closed the connection") from None

    def receive(self, seconds: float) -> list[Event]:
        """Wait for messages for at most ``seconds``, and return the new ones.

        Raises:
            WorkerGone: the worker has closed the connection.
        """
        events, self._waiting = self._waiting, []
        return events or list(self._read(seconds))

    def _read(self, seconds: float | None) -> Iterator[Event]:
        if not select.select([self._source], [], [], seconds)[0]:
            return
        data = os.read(self._source, PIECE_BYTES)
        if not data:
            raise WorkerGone("the worker has closed the connection")
        for line in self._lines.feed(data):
            value = json.loads(line)
            kind = _KINDS.get(value.get("event", ""))
            if kind is not None:  # ignore messages of newer versions
                yield from_dict(kind, value)
