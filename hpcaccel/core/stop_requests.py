"""Requests in the run directory's ``control/``: to stop, to save, and to dump stacks.

Requests are files, written by commands and by a sweep for its trials. The supervisor (rank 0 for saves) polls the
folder and renames a file once its request is honoured. The folder is always listed, and single names are never looked
up, because NFS clients may cache a name's absence for a while.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hpcaccel.core.durable_files import atomic_write, read_json
from hpcaccel.core.records import Reason, from_dict, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunDirectoryError

__all__ = [
    "SaveRequests",
    "StopRequest",
    "all_requests",
    "cancel_was_requested",
    "has_signal_mark",
    "leave_request",
    "leave_save_request",
    "leave_stacks_request",
    "mark_honoured",
    "open_requests",
    "pruned",
    "reopen",
    "request_state",
    "set_signal_mark",
    "stacks_requests",
]

LOG = logging.getLogger(__name__)

_HONOURED = "honoured-"
"""Prefix that is added to the file name of an honoured request."""
_SAVE = "save-"
_THEN = ("requeue", "pause", "finish", "cancel")
_USERS = "stop-"
"""File name prefix of a request from a user or a sweep's tuner."""


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """A request to stop the ranks. Requests in ``control/`` are for the supervisor, the one in
    ``attempts/<n>/stop.json`` is for the ranks."""

    version: int = 1
    reason: Reason
    then: Literal["requeue", "pause", "finish", "cancel"]
    """requeue: save, exit and continue later; pause: save and exit; finish: leave the loop and run the code after it;
    cancel: exit, and end the run."""
    time: float
    deadline: float | None = None
    """When the processes will be killed (seconds since the epoch); None if unknown."""


def pruned(stop: StopRequest | None) -> bool:
    """Whether ``stop`` is a sweep's request to end a trial early. The trial then does not continue by itself, even if
    another stop follows.

    With ``then="finish"`` the trial saves nothing. With ``then="pause"`` it saves a checkpoint, so that it can continue
    under a larger budget.
    """
    return stop is not None and stop.reason == "pruned"


def leave_request(run: RunDir, request: StopRequest, *, name: str | None = None) -> None:
    """Write a request to stop into ``control/``.

    Args:
        name: identifies the request for :func:`request_state`; random by default.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    path = run.control / f"{_USERS}{time.time_ns()}-{name or os.urandom(2).hex()}.json"
    try:
        text = json.dumps(to_dict(request), indent=1) + "\n"
        atomic_write(path, text, whatever_umask=True)  # the run's owner reads it, too
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write the request for run {run.run_id} to {run.control}: {error.strerror}"
        ) from None


def open_requests(run: RunDir, *, of_users: bool = False) -> list[tuple[str, StopRequest]]:
    """Requests to stop that have not been honoured yet, with their file names, oldest first.

    Args:
        of_users: whether to leave out the requests of a sweep worker to its trials.
    """
    found = []
    for name in sorted(_names(run)):
        if not name.endswith(".json") or name.startswith((_HONOURED, ".")):
            continue
        if of_users and not name.startswith(_USERS):
            continue
        if (value := _readable(run, name)) is not None:
            found.append((name, value))
    return sorted(found, key=lambda item: item[1].time)


def all_requests(run: RunDir) -> list[StopRequest]:
    """Requests to stop, honoured or not, oldest first."""
    found = [_readable(run, name) for name in _names(run) if name.endswith(".json") and name[0] != "."]
    return sorted((value for value in found if value is not None), key=lambda request: request.time)


def _readable(run: RunDir, name: str) -> StopRequest | None:
    """The request in a file. A file that cannot be read, which a group member may have written, is ignored."""
    try:
        value = read_json(run.control / name)
        request = None if value is None else from_dict(StopRequest, value)
    except (OSError, TypeError, RunDirectoryError) as error:
        LOG.warning("ignoring the request %s: %s", run.control / name, error)
        return None
    if request is None or (request.then in _THEN and isinstance(request.time, int | float)):
        return request
    LOG.warning("ignoring the request %s: its field then or time is missing or invalid", run.control / name)
    return None


def mark_honoured(run: RunDir, name: str) -> None:
    """Mark a request as honoured by renaming it, so that it is never honoured twice."""
    (run.control / name).rename(run.control / f"{_HONOURED}{name}")


def reopen(run: RunDir, name: str) -> None:
    """Undo :func:`mark_honoured`."""
    (run.control / f"{_HONOURED}{name}").rename(run.control / name)


def cancel_was_requested(run: RunDir) -> bool:
    """Whether a request to cancel was honoured. If so, the run does not continue even if its job starts again."""
    honoured = [name for name in _names(run) if name.startswith(_HONOURED) and name.endswith(".json")]
    found = [_readable(run, name) for name in honoured]
    return any(request is not None and request.then == "cancel" for request in found)


def request_state(run: RunDir, name: str) -> Literal["open", "honoured"] | None:
    """State of the request that :func:`leave_request` wrote under ``name``; None if there is none."""
    found = [one for one in _names(run) if one.endswith(f"-{name}.json")]
    if not found:
        return None
    return "honoured" if all(one.startswith(_HONOURED) for one in found) else "open"


def set_signal_mark(run: RunDir, attempt: int) -> None:
    """Write a marker: a rank has received a signal, and the supervisor must write the reason for the stop."""
    atomic_write(run.signalled(attempt), "", sync=False)


def has_signal_mark(run: RunDir, attempt: int) -> bool:
    """Whether a rank has called :func:`set_signal_mark` in this attempt."""
    return run.signalled(attempt).name in _names(run)


def leave_stacks_request(run: RunDir) -> None:
    """Write a request to dump the stacks of all ranks.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    _leave_empty_file(run, "stacks-")


def stacks_requests(run: RunDir) -> list[str]:
    """File names of requests for stack dumps that have not been honoured yet."""
    return [name for name in _names(run) if name.startswith("stacks-")]


def leave_save_request(run: RunDir) -> None:
    """Write a request to save a checkpoint and continue.

    Raises:
        RunDirectoryError: the file cannot be written.
    """
    _leave_empty_file(run, _SAVE)


def _leave_empty_file(run: RunDir, prefix: str) -> None:
    path = run.control / f"{prefix}{time.time_ns()}-{os.urandom(2).hex()}"
    try:
        atomic_write(path, "", sync=False, whatever_umask=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot write the request {path}: {error.strerror}") from None


class SaveRequests:
    """Requests to save, which rank 0 reads. The heartbeat's thread calls ``poll``, the training the other methods.

    A save honours the requests that were listed when it began. One that is made during a save causes another save.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.names: tuple[str, ...] = ()
        """Names of the files of the requests that no save has honoured. Read at each step."""
        self._begun: tuple[str, ...] = ()
        self._honoured: set[str] = set()

    @property
    def is_open(self) -> bool:
        return bool(self.names)

    def poll(self) -> None:
        """List the requests that have not been honoured."""
        self.names = tuple(name for name in _names(self._run) if name.startswith(_SAVE) and name not in self._honoured)

    def save_begins(self) -> None:
        self._begun = self.names

    def mark_honoured(self) -> None:
        """Mark the requests that were listed at ``save_begins`` as honoured, after the save."""
        names, self._begun = self._begun, ()
        for name in names:
            self._honoured.add(name)  # a file that cannot be renamed is not honoured again
            try:
                mark_honoured(self._run, name)
            except OSError as error:
                LOG.warning("cannot rename the request %s: %s", self._run.control / name, error.strerror)
        self.names = tuple(name for name in self.names if name not in self._honoured)


def _names(run: RunDir) -> Sequence[str]:
    try:
        return os.listdir(run.control)
    except FileNotFoundError:
        return []
    except OSError as error:
        LOG.warning("cannot read directory %s: %s", run.control, error.strerror)
        return []
