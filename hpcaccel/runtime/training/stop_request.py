"""What a stop is about and how long it leaves: the supervisor's word, which may have to be asked for.

In a preemption with grace time Slurm signals the ranks and nobody else, and only the batch step can ask Slurm how long
the grace is. Ranks whose saves take long therefore leave a word for the supervisor and wait a moment for its answer.
"""

from __future__ import annotations

import time
from typing import Any

from hpcaccel.core.records import StopRequest
from hpcaccel.core.run_dir import atomic_write, read_json
from hpcaccel.runtime.settings import Place

__all__ = ["PATIENCE_SECONDS", "WORTH_ASKING_SECONDS", "fits", "read_request"]

WORTH_ASKING_SECONDS = 5.0
"""Saves that take longer than this may not fit into a grace time."""
PATIENCE_SECONDS = 5.0
LOOK_SECONDS = 0.1


def read_request(place: Place, *, save_seconds: float | None) -> dict[str, Any] | None:
    """The request in ``stop.json``; None where there is no word from a supervisor.

    Args:
        save_seconds: how long the save is going to take, None where that is not known.
    """
    if place.run is None:
        return None
    path = place.run.stop(place.attempt)
    found = read_json(path)
    if found is not None or save_seconds is None or save_seconds < WORTH_ASKING_SECONDS:
        return found
    if not place.run.lease.exists():
        return None  # nobody supervises
    atomic_write(place.run.signalled(place.attempt), "", sync=False)
    give_up = time.monotonic() + PATIENCE_SECONDS
    while found is None and time.monotonic() < give_up:
        time.sleep(LOOK_SECONDS)
        found = read_json(path)
    return found


def fits(request: StopRequest, save_seconds: float | None) -> bool:
    """Whether a save that begins now ends before the processes are killed, as far as that is known."""
    if request.deadline is None or save_seconds is None:
        return True
    return time.time() + save_seconds <= request.deadline
