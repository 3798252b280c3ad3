"""One program on a login node that responds to all read requests of a service, until there are none for a minute."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

from hpcaccel.errors import HpcaccelError, RunBusy, RunNotFound, UserError
from hpcaccel.submission.remote.protocol import ConnectionLost
from hpcaccel.submission.remote.remote_cluster import RemoteRequest

__all__ = ["ReadingSession"]

ANSWER_SECONDS = 45.0
"""Longest wait for an answer, with the login."""
IDLE_SECONDS = 60.0
"""The program on the login node ends if nothing was asked for this long."""
TRIES = 2
"""A question is asked again if the connection broke meanwhile."""
_KINDS: dict[str, type[HpcaccelError]] = {"RunNotFound": RunNotFound, "RunBusy": RunBusy}


@dataclass(eq=False)
class _Question:
    document: dict[str, Any]
    answer: Future[Any] = field(default_factory=Future)
    tries: int = 0


class ReadingSession:
    """Sends read requests to a cluster, one at a time.

    Args:
        name: the cluster's name, for messages.
        converse: sends a request to the login node and calls its argument with the reply.
    """

    def __init__(self, name: str, converse: Callable[[dict[str, Any], Callable[[RemoteRequest], None]], Any]) -> None:
        self._name = name
        self._converse = converse
        self._changed = threading.Condition()
        self._waiting: deque[_Question] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def ask(self, run: str, what: str, options: dict[str, Any]) -> Any:
        """A reading of a run, see :func:`hpcaccel.service.run_readings.read_run`.

        Raises:
            ClusterError: there is no connection, or no answer in time.
            RunNotFound, RunBusy, UserError: the cluster's own error.
        """
        question = _Question({"run": run, "what": what, "options": options})
        with self._changed:
            self._waiting.append(question)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            return question.answer.result(timeout=ANSWER_SECONDS)
        except FutureTimeout:
            with self._changed:
                question.answer.cancel()
            raise ConnectionLost(f"{self._name} did not respond within {ANSWER_SECONDS:.0f} s") from None

    def close(self) -> None:
        """End the program on the login node."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or self._closed:
                    self._thread = None
                    return
            try:
                self._converse({"do": "readings"}, self._talk)
            except ConnectionLost as error:
                self._fail(error, but_new=True)
            except Exception as error:  # every question gets it
                self._fail(error)

    def _fail(self, error: Exception, *, but_new: bool = False) -> None:
        """Answer the waiting questions with ``error``; with ``but_new``, only those that were asked often enough."""
        with self._changed:
            for question in self._waiting:
                question.tries += 1
            failed = [one for one in self._waiting if not but_new or one.tries >= TRIES]
            self._waiting = deque(one for one in self._waiting if one not in failed)
            for question in failed:
                if not question.answer.done():
                    question.answer.set_exception(error)

    def _talk(self, conversation: RemoteRequest) -> None:
        conversation.expect("ready")
        while (question := self._next()) is not None:
            conversation.send(json.dumps(question.document).encode() + b"\n")
            head, payload = conversation.expect("reading")
            value = None if "error" in head else json.loads(payload)
            with self._changed:
                self._waiting.remove(question)
                if question.answer.done():
                    continue  # nobody waits for it any more
                if "error" in head:
                    kind = _KINDS.get(str(head.get("kind")), UserError)
                    question.answer.set_exception(kind(str(head["error"])))
                else:
                    question.answer.set_result(value)
        conversation.end_input()

    def _next(self) -> _Question | None:
        """The next question, which stays in the queue until it is answered; None if there was none for a while."""
        with self._changed:
            while True:
                while self._waiting and self._waiting[0].answer.done():
                    self._waiting.popleft()
                if self._closed:
                    return None
                if self._waiting:
                    return self._waiting[0]
                if not self._changed.wait(IDLE_SECONDS):
                    return None
