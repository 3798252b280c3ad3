"""``StepProfiler``: records some steps of this rank with torch's profiler, at the request of ``hpcaccel profile``.

The heartbeat's thread looks for a request; the training thread starts and stops torch's profiler between two steps; a
third thread writes the trace, which takes seconds for a large model. An error ends the recording, never the training.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcaccel.core.profile_requests import (
    MAX_STEPS,
    ProfileRequest,
    RankProfile,
    close_profile_request,
    open_profile_request,
    profiles_folder,
    profiles_of,
    write_rank_profile,
)
from hpcaccel.core.run_dir import RunDir

__all__ = ["StepProfiler"]

LOG = logging.getLogger(__name__)

MAX_SECONDS = 600.0
"""A recording ends after this time, with the steps that it has: its events are in memory."""


class StepProfiler:
    """The recordings of one rank, one at a time."""

    def __init__(self, run: RunDir, attempt: int, *, rank: int) -> None:
        self.is_active = False
        """Whether ``at_step`` has something to do. Read at each step, so it is a plain attribute."""
        self._run = run
        self._attempt = attempt
        self._rank = rank
        self._handled: set[str] = set()
        self._wanted: ProfileRequest | None = None
        self._profiler: Any = None
        self._mark: Any = None
        self._now: RankProfile
        self._began = 0.0

    # -- in the heartbeat's thread ------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Look for a request. On rank 0, close a request that all its ranks have carried out."""
        try:
            self._look()
        except Exception as error:  # the heartbeat must continue, whatever a file in ``control/`` contains
            LOG.warning("the request for a profile could not be read: %s", error)

    def _look(self) -> None:
        request = open_profile_request(self._run)
        if request is None or not isinstance(request.steps, int):
            return
        if self._rank == 0 and self._is_over(request):
            close_profile_request(self._run, request)
        elif self._rank in request.ranks and request.attempt == self._attempt and request.id not in self._handled:
            self._handled.add(request.id)
            self._wanted = request
            self.is_active = True

    def _is_over(self, request: ProfileRequest) -> bool:
        if request.attempt != self._attempt:
            return request.attempt < self._attempt
        over = {one.rank for one in profiles_of(self._run, self._attempt, request=request.id) if one.is_over}
        return over >= set(request.ranks)

    # -- in the training's thread -------------------------------------------------------------------------------------

    def at_step(self, step: int) -> None:
        """Begin, continue or end a recording.

        Args:
            step: number of completed steps.
        """
        try:
            if self._profiler is None:
                self._begin(step)
            else:
                self._go_on(step)
        except Exception as error:  # whatever torch's profiler raises, the training continues
            self._give_up(f"{type(error).__name__}: {error}")

    def abandon(self) -> None:
        """End a recording without a trace, because the rank leaves its loop now."""
        if self._profiler is not None:
            self._give_up("the run stopped before the last step of the recording")

    def _begin(self, step: int) -> None:
        request, self._wanted = self._wanted, None
        if request is None:
            return self._rest()
        self._now = RankProfile(
            request=request.id, rank=self._rank, state="recording", first_step=step + 1,
            steps=min(request.steps, MAX_STEPS),
        )  # fmt: skip
        torch = sys.modules.get("torch")
        if torch is None:
            return self._give_up("the program does not use torch, whose profiler records the steps")
        if torch.autograd._profiler_enabled():
            return self._give_up("the program is using torch's profiler itself")
        self._write()
        self._profiler = torch.profiler.profile()
        self._profiler.start()
        self._began = time.monotonic()
        self._mark_step(torch, step)
        return None

    def _go_on(self, step: int) -> None:
        self._mark.__exit__(None, None, None)
        done = step - self._now.first_step + 1
        late = time.monotonic() - self._began > MAX_SECONDS
        if done < self._now.steps and not late:
            self._mark_step(sys.modules["torch"], step)
            return
        profiler, self._profiler, self._mark = self._profiler, None, None
        profiler.stop()
        short = f"{done} steps took {MAX_SECONDS:.0f} s" if done < self._now.steps else ""
        self._now = replace(self._now, state="writing", steps=done, detail=short, time=time.time())
        self._write()
        threading.Thread(target=self._export, args=(profiler, self._now), name="hpcaccel-profile").start()
        self._rest()

    def _rest(self) -> None:
        """Do nothing at the next steps. A request that the heartbeat's thread sees meanwhile is kept."""
        self.is_active = False
        if self._wanted is not None:
            self.is_active = True

    def _mark_step(self, torch: Any, step: int) -> None:
        """Show the next step in the trace, by its number."""
        self._mark = torch.profiler.record_function(f"training step {step + 1}")
        self._mark.__enter__()

    def _give_up(self, why: str) -> None:
        profiler, self._profiler, self._mark = self._profiler, None, None
        LOG.warning("no profile was recorded: %s", why)
        try:
            if profiler is not None:
                profiler.stop()
        except Exception as error:  # as in ``at_step``
            LOG.warning("torch's profiler could not be stopped: %s", error)
        self._fail(self._now, why)
        self._rest()

    # -- in the thread that writes the trace --------------------------------------------------------------------------

    def _export(self, profiler: Any, now: RankProfile) -> None:
        path = profiles_folder(self._run, self._attempt) / f"step_{now.first_step}-rank{now.rank}.json.gz"
        temporary = path.with_name(f".{now.request}-{path.name}")
        try:
            profiler.export_chrome_trace(str(temporary))
            os.replace(temporary, path)
            size = path.stat().st_size
            write_rank_profile(self._run, self._attempt, self._written(now, path, size))
            LOG.info("profile of %d steps: %s", now.steps, path)
        except Exception as error:  # as in ``at_step``
            self._fail(now, f"the trace could not be written: {error}")
            _remove(temporary)

    def _written(self, now: RankProfile, path: Path, size: int) -> RankProfile:
        file = str(path.relative_to(self._run.path))
        return replace(now, state="done", file=file, bytes=size, time=time.time())

    # -- records ------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        write_rank_profile(self._run, self._attempt, self._now)

    def _fail(self, now: RankProfile, why: str) -> None:
        try:
            write_rank_profile(self._run, self._attempt, replace(now, state="failed", detail=why, time=time.time()))
        except OSError as error:
            LOG.warning("the profile's record could not be written: %s", error)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        LOG.warning("%s could not be removed: %s", path, error)
