"""Steps in shutting down process groups: a barrier, a wait for busy threads, and keeping groups after a failure."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = ["EndBarrier", "keep_groups", "settle"]

SETTLE_SECONDS = 2.0
SETTLE_POLL_SECONDS = 0.001
QUIET_POLLS = 5
"""Number of consecutive polls that must find no other thread running."""
FIRST_POLL_SECONDS = 0.005
LONGEST_POLL_SECONDS = 1.0
READ_SECONDS = 2.0
"""Maximum time that rank 0 waits for the other ranks to read that all ranks have arrived."""


class EndBarrier:
    """Barrier at the end of the program. It uses the ranks' store, because a collective could be matched with a
    different collective of a rank that has not reached its end yet.

    Args:
        store: a ``torch.distributed`` store that all ranks share.
        failure_keys: keys of the store, at least one of which exists once a rank has failed.
    """

    def __init__(self, store: Any, *, rank: int, world_size: int, failure_keys: Iterable[str]) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._failure_keys = tuple(failure_keys)
        self._round = 0

    def wait(self, seconds: float, *, at_each_poll: Callable[[], object] = lambda: None) -> str | None:
        """Wait until all ranks have called ``wait`` as often as this rank.

        Args:
            at_each_poll: called about once a second while this rank waits.

        Returns:
            None if all ranks arrived within ``seconds``, else the reason why this rank stopped waiting.
        """
        self._round += 1
        key, deadline, pause = f"end/{self._round}", time.monotonic() + seconds, FIRST_POLL_SECONDS
        store = self._store
        try:
            if store.add(f"{key}/arrived", 1) == self._world_size:
                store.set(f"{key}/all", "")
            while not store.check([f"{key}/all"]):
                if any(store.check([failure]) for failure in self._failure_keys):
                    return "a rank has failed"
                if time.monotonic() > deadline:
                    arrived = store.add(f"{key}/arrived", 0)
                    return (
                        f"only {arrived} of {self._world_size} ranks reached the end of the program within "
                        f"{seconds:.0f} s"
                    )
                at_each_poll()
                time.sleep(pause)
                pause = min(1.5 * pause, LONGEST_POLL_SECONDS)
            store.add(f"{key}/read", 1)
            # Rank 0 may host the store, so it waits until all ranks have read the result.
            deadline = min(deadline, time.monotonic() + READ_SECONDS)
            while self._rank == 0 and store.add(f"{key}/read", 0) < self._world_size and time.monotonic() < deadline:
                time.sleep(FIRST_POLL_SECONDS)
        except RuntimeError as error:
            return f"the connection to the ranks' store was lost ({error})"
        return None


def settle() -> None:
    """Sleep, which releases the GIL, until all other threads of this process sleep too, for at most
    ``SETTLE_SECONDS``."""
    deadline = time.monotonic() + SETTLE_SECONDS
    quiet = 0
    while quiet < QUIET_POLLS and time.monotonic() < deadline:
        time.sleep(SETTLE_POLL_SECONDS)
        quiet = 0 if _others_run() else quiet + 1


def _others_run() -> bool:
    own = str(threading.get_native_id())
    for task in Path("/proc/self/task").iterdir():
        if task.name == own:
            continue
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended
        if state not in "SZX":
            return True
    return False


def keep_groups() -> None:
    """Keep the current process groups until the process ends: destroying them could wait for ranks that are gone."""
    import torch.distributed as dist  # a single-process program may run without torch

    if not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        if id(group) not in _kept:
            _kept.add(id(group))
            # Leak a reference. A reference in a module's list would be released when Python clears its modules.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


_kept: set[int] = set()
