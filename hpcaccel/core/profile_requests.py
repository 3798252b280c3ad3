"""The request of ``hpcaccel profile`` in ``control/``, and what the ranks record about their traces.

A run has at most one open request, the file ``control/profile``, which is created by link(2): two commands at the same
time make one request. It is valid in one attempt. Each requested rank records its progress in
``attempts/<n>/profiles/<request>-rank<r>.json``, beside its trace. Rank 0 renames the request when all are done.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpcaccel.core.durable_files import atomic_write, make_folder, read_json, write_json
from hpcaccel.core.records import from_dict, to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunDirectoryError, UserError

__all__ = [
    "MAX_RANKS",
    "MAX_STEPS",
    "ProfileRequest",
    "RankProfile",
    "close_profile_request",
    "leave_profile_request",
    "open_profile_request",
    "profiles_folder",
    "profiles_of",
    "write_rank_profile",
]

MAX_STEPS = 50
"""Maximum number of steps of a trace: each step of a large model adds some ten thousand events."""
MAX_RANKS = 16
_OPEN = "profile"
_NOTE = re.compile(r"[0-9a-f-]+-rank[0-9]+\.json")


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """A request to record the next steps of some ranks."""

    version: int = 1
    id: str = field(default_factory=lambda: f"{time.time_ns()}-{os.urandom(2).hex()}")
    steps: int
    ranks: list[int]
    attempt: int
    """The attempt in which the request is valid. A later attempt ignores it."""
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """How far a rank is with a request. ``recording`` and ``writing`` remain if the rank is killed."""

    version: int = 1
    request: str
    rank: int
    state: Literal["recording", "writing", "done", "failed"]
    first_step: int
    """Number of the first recorded step; a training's first step has the number 1."""
    steps: int
    """Number of steps to record; when the trace is complete, the number of recorded steps."""
    file: str | None = None
    """The trace, relative to the run directory; None until it is complete."""
    bytes: int = 0
    time: float = field(default_factory=time.time)
    detail: str = ""
    """Why there is no trace, or why it has fewer steps."""

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed")


def profiles_folder(run: RunDir, attempt: int) -> Path:
    """Folder with an attempt's traces, and the ranks' records about them."""
    return run.attempt(attempt) / "profiles"


def leave_profile_request(run: RunDir, request: ProfileRequest) -> ProfileRequest:
    """Write ``request``, unless the same one is open already.

    Returns:
        The open request.

    Raises:
        UserError: another request is open, for other ranks or another number of steps.
        RunDirectoryError: the request cannot be written.
    """
    path = run.control / _OPEN
    temporary = path.with_name(f".{_OPEN}-{request.id}")
    try:
        atomic_write(temporary, json.dumps(asdict(request)) + "\n", sync=False, whatever_umask=True)
        try:
            while True:
                try:
                    os.link(temporary, path)
                    return request
                except FileExistsError:
                    there = open_profile_request(run)
                if there is not None and there.attempt >= request.attempt:
                    return _same(there, request)
                if there is not None:
                    close_profile_request(run, there)  # of an attempt that has ended
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot write the request {path}: {error.strerror}") from None


def _same(there: ProfileRequest, request: ProfileRequest) -> ProfileRequest:
    if (there.steps, there.ranks) == (request.steps, request.ranks):
        return there
    ranks = ", ".join(map(str, there.ranks))
    raise UserError(
        f"a profile of {there.steps} steps of rank {ranks} is already requested: wait until its trace is written, or "
        "request the same"
    )


def open_profile_request(run: RunDir) -> ProfileRequest | None:
    """The request that is open; None if there is none. The folder is listed first, since NFS clients cache absence."""
    try:
        if _OPEN not in os.listdir(run.control):
            return None
        value = read_json(run.control / _OPEN)
    except (OSError, RunDirectoryError):
        return None
    return None if value is None else from_dict(ProfileRequest, value)


def close_profile_request(run: RunDir, request: ProfileRequest) -> None:
    """Close a request, so that no rank begins to record. A request that another process closes meanwhile is ignored."""
    there = open_profile_request(run)
    if there is not None and there.id == request.id:
        try:
            (run.control / _OPEN).rename(run.control / f"honoured-{_OPEN}-{request.id}")
        except FileNotFoundError:
            return


def write_rank_profile(run: RunDir, attempt: int, profile: RankProfile) -> None:
    """Record how far a rank is.

    Raises:
        OSError: the file cannot be written.
    """
    folder = profiles_folder(run, attempt)
    make_folder(folder, within=run.path)
    write_json(folder / f"{profile.request}-rank{profile.rank}.json", to_dict(profile), sync=False)


def profiles_of(run: RunDir, attempt: int, *, request: str | None = None) -> list[RankProfile]:
    """The records of an attempt's ranks, oldest request first.

    Args:
        request: id of a request; the records of other requests are left out.
    """
    try:
        names = sorted(os.listdir(profiles_folder(run, attempt)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    values: list[dict[str, Any] | None] = [
        read_json(profiles_folder(run, attempt) / name)
        for name in names
        if _NOTE.fullmatch(name) and (request is None or name.startswith(f"{request}-"))
    ]
    found = [from_dict(RankProfile, value) for value in values if value]
    return sorted(found, key=lambda one: (one.request, one.rank))
