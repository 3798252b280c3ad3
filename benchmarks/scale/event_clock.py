"""A discrete-event simulation: a clock with events in order of time, and servers with a queue."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count

__all__ = ["EventClock", "QueueServer"]


class EventClock:
    """Calls functions at simulated times. ``now`` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call ``call`` after ``seconds``. Events of the same time are called in the order of their making."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def step(self) -> bool:
        """Call the next event. Returns False if there is none."""
        if not self._events:
            return False
        self.now, _, call = heapq.heappop(self._events)
        call()
        return True

    def run(self) -> float:
        """Call all events; return the time of the last one."""
        while self.step():
            pass
        return self.now


class QueueServer:
    """Serves requests one after the other, in the order of their arrival."""

    def __init__(self, clock: EventClock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._busy = False
        self.requests = 0
        self.busy_seconds = 0.0
        self.longest_queue = 0

    def request(self, service_seconds: float, then: Callable[[], None]) -> None:
        """Queue a request that takes ``service_seconds``; call ``then`` when it has been served."""
        self.requests += 1
        self._waiting.append((service_seconds, then))
        self.longest_queue = max(self.longest_queue, len(self._waiting))
        if not self._busy:
            self._serve()

    def _serve(self) -> None:
        self._busy = True
        seconds, then = self._waiting.popleft()
        self.busy_seconds += seconds

        def served() -> None:
            self._busy = False
            if self._waiting:
                self._serve()
            then()

        self._clock.after(seconds, served)
