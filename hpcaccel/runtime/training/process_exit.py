"""``ProcessExit``: reads the stop request, writes ``outcome.json``, and leaves the process group at the exit.

A program that ends normally writes the outcome ``completed``. A program that was stopped writes the step and the
checkpoint from which it will continue, and raises ``SystemExit``. A program that fails writes no outcome.

In a preemption with grace time Slurm signals only the ranks, and only the batch step can query the grace time. If saves
take long, rank 0 therefore writes a marker for the supervisor, and waits briefly for the supervisor's stop request.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hpcaccel.core.durable_files import atomic_write, make_folder, read_json, write_json
from hpcaccel.core.stop_requests import set_signal_mark
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.runtime.distributed import rank_env
from hpcaccel.runtime.distributed.group_shutdown import settle
from hpcaccel.runtime.rank_logger import TRAINING_LOG, torch_distributed
from hpcaccel.runtime.settings import OutputLocation

if TYPE_CHECKING:
    from hpcaccel.core.rank_records import Outcome
    from hpcaccel.core.stop_requests import StopRequest
    from hpcaccel.runtime.distributed.process_group import RankGroup

__all__ = ["LoneRank", "ProcessExit", "is_in_time", "join_default_group", "read_request"]

logger = logging.getLogger(TRAINING_LOG)

T = TypeVar("T")

LONG_SAVE_SECONDS = 5.0
"""Saves that take longer than this may not fit into a grace time."""
REQUEST_TIMEOUT_SECONDS = 5.0
"""How long rank 0 waits for the supervisor's stop request."""
POLL_SECONDS = 0.1
EXIT_TERMINATED = 143
"""Exit code of a stop without a checkpoint, equal to that of a process ended by SIGTERM."""


class ProcessExit:
    """Writes the outcome and leaves the process group.

    Args:
        at_end: called at the normal end of the program; it must call ``complete``.
        ignore_signals: called when the process exits, to make it ignore stop signals.
    """

    def __init__(
        self,
        place: OutputLocation,
        group: RankGroup | LoneRank,
        at_end: Callable[[], None],
        ignore_signals: Callable[[], None] = lambda: None,
    ) -> None:
        self._place = place
        self._group = group
        self._at_end = at_end
        self._ignore_signals = ignore_signals
        self._failed = False
        self._left = False
        self._exiting = False
        self._remove_earlier_outcome()
        self._hook = sys.excepthook
        sys.excepthook = self._note_failure
        atexit.register(self._at_exit)

    def request(self, *, save_seconds: float | None = None) -> tuple[StopRequest, bool]:
        """Returns the stop request that rank 0 has read, and whether there is time to save. If the supervisor has
        written no request, the signal came from the cluster; the returned request then continues the training later.

        Args:
            save_seconds: expected time of a save on rank 0; None if unknown.
        """
        from hpcaccel.core.records import from_dict
        from hpcaccel.core.stop_requests import StopRequest

        request, in_time = StopRequest(reason="stop", then="requeue", time=0.0), True
        if self._group.is_main:
            found = read_request(self._place, save_seconds=save_seconds)
            request = request if found is None else from_dict(StopRequest, found)
            in_time = is_in_time(request, save_seconds)
        found_on_main: tuple[StopRequest, bool] = self._group.from_main((request, in_time))
        return found_on_main

    def leave(self, outcome: Outcome, *, saved: bool) -> NoReturn:
        """Write the outcome, wait for all ranks, and exit.

        Raises:
            SystemExit: always. The exit code is 0 if the training is not to be continued; otherwise it is 85 if
                ``saved`` is true, and 143 if not.
        """
        self._ignore_signals()
        self._write(outcome)
        self._group.wait_for_all()
        self._left = True
        from hpcaccel.core.rank_protocol import EXIT_CONTINUED

        if not outcome.resume:
            raise SystemExit(0)
        raise SystemExit(EXIT_CONTINUED if saved else EXIT_TERMINATED)

    def complete(self, outcome: Outcome) -> None:
        """Write the outcome of a normal end, wait for all ranks, and leave the process group. At the program's exit,
        the group is left only if all ranks have arrived."""
        self._write(outcome)
        # At exit, a missing rank may still be in a collective; in the middle of a script a new group may follow.
        if self._group.wait_at_exit() or not self._exiting:
            self._group.leave()
        self.forget()

    def forget(self) -> None:
        """Remove the exit handlers, so that nothing is done at the end of the program."""
        atexit.unregister(self._at_exit)
        # Keep a hook that was installed later.
        if sys.excepthook == self._note_failure:
            sys.excepthook = self._hook

    def _remove_earlier_outcome(self) -> None:
        """Remove the outcome of an earlier training of this program."""
        run = self._place.run
        if run is not None and self._group.is_main:
            run.outcome(self._place.attempt).unlink(missing_ok=True)

    def _write(self, outcome: Outcome) -> None:
        run = self._place.run
        if run is not None and self._group.is_main:
            path = run.outcome(self._place.attempt)
            make_folder(path.parent)
            from hpcaccel.core.records import to_dict

            write_json(path, to_dict(outcome))

    def _note_failure(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._failed = True
        broken = None if self._group.exchange is None else self._group.exchange.watchdog.failure
        if broken is not None:
            self._write_reason(broken)
        self._group.publish_failure(error)
        self._hook(kind, error, traceback)
        if broken is None:
            self._log_reason_of_others()

    def _write_reason(self, text: str) -> None:
        """Write the reason for this rank's failure to the run directory. Ranks that wait in a torch collective get only
        a connection error; they read the reason there, because the store may end with this process."""
        run = self._place.run
        if run is not None:
            path = run.abort_reason(self._place.attempt)
            make_folder(path.parent)
            from hpcaccel.core.log import Mask

            atomic_write(path, Mask.of(run)(text), sync=False)

    def _log_reason_of_others(self) -> None:
        """Log why another rank has failed, if this rank failed as a consequence."""
        if self._group.exchange is None:
            return
        reason, run = self._group.exchange.watchdog.abort_message(), self._place.run
        if reason is None and run is not None:
            path = run.abort_reason(self._place.attempt)
            reason = path.read_text() if path.exists() else None
        if reason is not None:
            logger.error("another rank aborted first: %s", reason)
            return
        for gone in self._group.exchange.watchdog.ranks_at_end():
            logger.error("%s while this rank was waiting for it", gone)

    def _at_exit(self) -> None:
        self._exiting = True
        if self._left:
            self._group.leave()
        elif not self._failed:
            self._at_end()
            self._ignore_signals()
        settle()


def read_request(place: OutputLocation, *, save_seconds: float | None) -> dict[str, Any] | None:
    """The request in ``stop.json``; None if there is none.

    Args:
        save_seconds: expected time of a save; None if unknown. If saves take long, wait for the supervisor's request.
    """
    if place.run is None:
        return None
    path = place.run.stop(place.attempt)
    found = read_json(path)
    if found is not None or save_seconds is None or save_seconds < LONG_SAVE_SECONDS:
        return found
    if not place.run.lease.exists():
        return None  # there is no supervisor
    set_signal_mark(place.run, place.attempt)
    give_up = time.monotonic() + REQUEST_TIMEOUT_SECONDS
    while found is None and time.monotonic() < give_up:
        time.sleep(POLL_SECONDS)
        found = read_json(path)
    return found


def is_in_time(request: StopRequest, save_seconds: float | None) -> bool:
    """Whether a save that starts now is expected to end before the processes are killed; True if that is unknown."""
    if request.deadline is None or save_seconds is None:
        return True
    return time.time() + save_seconds <= request.deadline


class LoneRank:
    """Takes the place of ``RankGroup`` in a process that does not coordinate with any other. Needs no torch.

    Args:
        rank: the process's rank. Only rank 0 writes the run's files, even if other processes run beside it.
    """

    control: None = None
    exchange: None = None
    world_size = 1
    is_alive = True

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.is_main = rank == 0

    def max_of(self, value: int, what: str = "") -> int:
        return value

    def from_main(self, value: T, what: str = "") -> T:
        return value

    def wait_for_all(self, what: str = "") -> None:
        """Do nothing: there is no other rank."""

    def wait_at_exit(self) -> bool:
        return True

    def publish_failure(self, error: BaseException) -> None:
        """Do nothing: there is no other rank."""

    def leave(self) -> None:
        """Do nothing: there is no group."""


def join_default_group() -> RankGroup | LoneRank:
    """The ranks of torch's default process group; this process alone if there is no group or it has a single rank.

    Raises:
        RankEnvironmentError: the process groups of these ranks cannot be formed.
    """
    if torch_distributed() is None:
        return LoneRank(int(os.environ.get("RANK", 0)))
    import torch

    from hpcaccel.runtime.distributed import process_group
    from hpcaccel.runtime.distributed.world import place_in_scripts_group

    try:
        env = rank_env.detect()
    except RankEnvironmentError:  # the program may have formed its group from an address of its own
        env = rank_env.ALONE
    env = place_in_scripts_group(env)
    return LoneRank(env.rank) if env.world_size == 1 else process_group.join(env, torch.device("cpu"))
