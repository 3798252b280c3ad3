"""The user who owns a run, and what other users may request of it (``sharing: group``)."""

from __future__ import annotations

import os
import pwd
import warnings

from hpcaccel.core.run_dir import RunDir

__all__ = ["is_of_another_user", "owner_of", "say_that_requested"]


def is_of_another_user(run: RunDir) -> bool:
    """Whether another user owns a run, whose jobs belong to that user, too. False for root."""
    return os.geteuid() not in (0, run.path.stat().st_uid)


def owner_of(run: RunDir) -> str:
    """Name of the user who owns a run; the number of a user without a name."""
    uid = run.path.stat().st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def say_that_requested(run: RunDir, *, pending: bool) -> None:
    """Warn that only the request was written, because a user can cancel no other user's jobs."""
    if pending:
        warnings.warn(
            f"run {run.run_id} belongs to {owner_of(run)}, who alone can remove its pending job from the queue. The "
            "request is saved: the job exits when it starts",
            stacklevel=3,
        )
