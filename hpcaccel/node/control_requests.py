"""Requests from outside, as files in ``control/``: polled by the supervisor alone."""

from __future__ import annotations

import os
import sys

from hpcaccel.core.records import StopRequest, from_dict
from hpcaccel.core.run_dir import RunDir, read_json

__all__ = ["cancel_was_asked", "honour", "pending_requests", "ranks_ask"]

HONOURED = "honoured-"


def pending_requests(run: RunDir) -> list[tuple[str, StopRequest]]:
    """Requests that nobody honoured yet, by file name, oldest first.

    A directory scan, never a look at one name: NFS remembers for a while that a name did not exist.
    """
    try:
        names = sorted(
            entry.name
            for entry in os.scandir(run.control)
            if entry.name.endswith(".json") and not entry.name.startswith((HONOURED, "."))
        )
    except OSError as error:
        print(f"hpcaccel: cannot look into {run.control}: {error.strerror}", file=sys.stderr, flush=True)
        return []
    found = []
    for name in names:
        value = read_json(run.control / name)
        if value is not None:
            found.append((name, from_dict(StopRequest, value)))
    return sorted(found, key=lambda item: item[1].time)


def honour(run: RunDir, name: str) -> None:
    """Mark a request as honoured, by a rename, so that it is never honoured twice."""
    (run.control / name).rename(run.control / f"{HONOURED}{name}")


def cancel_was_asked(run: RunDir) -> bool:
    """True when a request to cancel was honoured before: whatever starts the job again then, it is over."""
    honoured = run.control.glob(f"{HONOURED}*.json")
    return any((read_json(path) or {}).get("then") == "cancel" for path in honoured)


def ranks_ask(run: RunDir, attempt: int) -> bool:
    """Whether the ranks have heard a signal and want to know what it means; a directory scan, as above."""
    name = run.signalled(attempt).name
    try:
        return name in os.listdir(run.control)
    except OSError:
        return False  # said by ``pending_requests``
