"""``hpcaccel profile``: request a trace of the next steps of a running training, and wait until it is written."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from hpcaccel.core.launch_spec import find_launch
from hpcaccel.core.profile_requests import (
    MAX_RANKS,
    MAX_STEPS,
    ProfileRequest,
    RankProfile,
    close_profile_request,
    leave_profile_request,
    profiles_of,
)
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import UserError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.runs.status import RunStatus, status

__all__ = ["follow_profile", "request_profile"]

LOOK_SECONDS = 0.5
ASK_SECONDS = 20.0
"""Interval at which the run's state is read while its ranks record."""


def request_profile(
    run: RunDir, *, steps: int = 5, ranks: Sequence[int] = (0,), slurm: Slurm | None = None
) -> ProfileRequest:
    """Request that ranks of a running training record their next steps, and continue.

    The same request while the first one is open has no further effect.

    Args:
        steps: number of optimizer steps, 1 to 50.
        ranks: the ranks that record, at most 16.

    Raises:
        UserError: no training is running, ``steps`` or ``ranks`` are out of range, the program does not use hpcaccel's
            runtime, or another request is open.
        RunDirectoryError: the request cannot be written.
    """
    now = status(run, slurm or Slurm())
    if isinstance(run, SweepDir) or now.tasks:
        what = (
            "a sweep: profile one of its trials" if isinstance(run, SweepDir) else "an array: profile one of its tasks"
        )
        raise UserError(f"{now.run_id} is {what}, such as {now.run_id}_0")
    if now.state != "running":
        raise UserError(f"run {now.run_id} is {now.state}: only the steps of a running training can be recorded")
    launch = find_launch(run)
    if launch is not None and not launch.cooperative:
        raise UserError(
            f"run {now.run_id} has runtime.stop: signals: its program does not report its steps to hpcaccel, so "
            "nothing can record them. Call hpcaccel.stop_gate() in its loop, or use torch.profiler in the program"
        )
    chosen = _in_range(steps, sorted(set(ranks)), None if launch is None else launch.ranks)
    return leave_profile_request(run, ProfileRequest(steps=steps, ranks=chosen, attempt=now.attempts))


def _in_range(steps: int, ranks: list[int], world_size: int | None) -> list[int]:
    if not 1 <= steps <= MAX_STEPS:
        raise UserError(f"{steps} steps cannot be recorded: choose 1 to {MAX_STEPS}, since each step adds to the trace")
    if not ranks or len(ranks) > MAX_RANKS:
        raise UserError(f"{len(ranks)} ranks cannot record at once: choose 1 to {MAX_RANKS}")
    if ranks[0] < 0 or (world_size is not None and ranks[-1] >= world_size):
        last = f" to {world_size - 1}" if world_size else ""
        raise UserError(f"there is no rank {ranks[0] if ranks[0] < 0 else ranks[-1]}: the run has ranks 0{last}")
    return ranks


def follow_profile(
    run: RunDir, request: ProfileRequest, *, timeout_seconds: float | None = None, slurm: Slurm | None = None
) -> Iterator[list[RankProfile]]:
    """Yield what the ranks have recorded, at each change, until all traces are written or have failed.

    Args:
        timeout_seconds: how long to wait for the first rank to begin; then the request is withdrawn.

    Raises:
        UserError: no rank has begun in time, or the attempt ended first.
    """
    slurm = slurm or Slurm()
    begun = asked = time.monotonic()
    shown: list[RankProfile] | None = None
    while True:
        found = profiles_of(run, request.attempt, request=request.id)
        if found != shown:
            yield found
            shown = found
        if {one.rank for one in found if one.is_over} >= set(request.ranks):
            return
        now = time.monotonic()
        if timeout_seconds is not None and not found and now - begun > timeout_seconds:
            close_profile_request(run, request)
            raise UserError(
                f"no rank has begun to record within {timeout_seconds:.0f} s, so the request was withdrawn. "
                "The training may be between two steps (starting, evaluating, saving), or its program uses neither "
                f"hpcaccel's loop nor stop_gate(). To see where it is, run `hpcaccel stacks {run.run_id}`"
            )
        if now - asked > ASK_SECONDS:
            asked = now
            _refuse_ended(run, request, status(run, slurm))
        time.sleep(LOOK_SECONDS)


def _refuse_ended(run: RunDir, request: ProfileRequest, now: RunStatus) -> None:
    """Raise UserError if the attempt in which the request is valid has ended."""
    if now.state == "running" and now.attempts == request.attempt:
        return
    over = profiles_of(run, request.attempt, request=request.id)
    if {one.rank for one in over if one.is_over} >= set(request.ranks):
        return
    close_profile_request(run, request)
    raise UserError(
        f"run {now.run_id} is {now.state}, attempt {now.attempts}: attempt {request.attempt} ended before its trace "
        "was written. Request it again while the run is training"
    )
