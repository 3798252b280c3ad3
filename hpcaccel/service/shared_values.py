"""Values that many viewers share: each is computed once at a time, and kept for a short while."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["SharedValues"]

T = TypeVar("T")


@dataclass
class _Slot(Generic[T]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    value: T | None = None
    read: float = float("-inf")
    took: float = 0.0


class SharedValues(Generic[T]):
    """At most ``most`` values by key; the one that was not used for the longest time is dropped.

    Args:
        seconds: how long a value is valid; ten times as long as it took to compute, if that is longer.
    """

    def __init__(self, *, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._lock = threading.Lock()
        self._slots: OrderedDict[Hashable, _Slot[T]] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The value of ``key``. While one thread computes it, the others wait for its result.

        Raises:
            what ``compute`` raises; nothing is kept then.
        """
        with self._lock:
            slot = self._slots.setdefault(key, _Slot())
            self._slots.move_to_end(key)
            while len(self._slots) > self._most:
                self._slots.popitem(last=False)
        with slot.lock:
            now = time.monotonic()
            if slot.value is None or now - slot.read > max(self._seconds, 10 * slot.took):
                slot.value = compute()
                slot.read = time.monotonic()
                slot.took = slot.read - now
            return slot.value

    def forget(self) -> None:
        """Drop all values, because an action has changed what they show."""
        with self._lock:
            self._slots.clear()
