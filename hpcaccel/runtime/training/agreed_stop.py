"""``AgreedStop``: the stop of one training. The training loop and the stop gate each have one.

It holds what a stop consists of: the flag that signals set, the agreement of the ranks at each step, the request with
the reason and what follows, ``hpcaccel save``, and the exit with its outcome; and ``hpcaccel profile``, which
both owners need at each step. What is saved, and how, is decided by its owner: ``TrainingEnd`` and ``SaveSchedule`` for
the loop, the program for the gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from hpcaccel.runtime.health.heartbeat import save_requests, step_profiler
from hpcaccel.runtime.training.process_exit import LoneRank, ProcessExit
from hpcaccel.runtime.training.stop_agreement import StopAgreement

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccel.core.rank_records import Outcome
    from hpcaccel.core.stop_requests import StopRequest
    from hpcaccel.runtime.distributed.process_group import RankGroup
    from hpcaccel.runtime.settings import OutputLocation
    from hpcaccel.runtime.stop_flag import PendingStop, StopFlag
    from hpcaccel.runtime.training.attempt_timing import AttemptClock

__all__ = ["AgreedStop"]


class AgreedStop:
    """Agrees with the other ranks on a stop, reads the request, and exits.

    Args:
        flag: is raised by the stop signals of this process.
        clock: measures how long a save takes.
        at_end: called at the normal end of the program; it must call ``complete``.
    """

    def __init__(
        self,
        place: OutputLocation,
        group: RankGroup | LoneRank,
        *,
        flag: StopFlag | PendingStop,
        clock: AttemptClock,
        at_end: Callable[[], None],
    ) -> None:
        self.flag = flag
        self.agreement = StopAgreement(group.control, None if group.exchange is None else group.exchange.watchdog)
        self.save_requests = save_requests()
        """The requests of ``hpcaccel save``; None outside a run."""
        self.profiler = step_profiler()
        """Records steps for ``hpcaccel profile``; None outside a run."""
        self.request: StopRequest | None = None
        """The request of the last stop; None if the ranks have not agreed on a stop."""
        self.in_time = True
        """Whether a save is expected to end before the processes are killed; True if unknown."""
        self._clock = clock
        self._exit = ProcessExit(place, group, at_end, flag.ignore_signals)

    def step_is_over(self, step: int) -> None:
        """Begin, continue or end a recording for ``hpcaccel profile``, when ``step`` is over."""
        if self.profiler is not None and self.profiler.is_active:
            self.profiler.at_step(step)

    @property
    def save_is_requested(self) -> bool:
        """Whether ``hpcaccel save`` has requested a save that has not begun. Seen on rank 0 only."""
        return self.save_requests is not None and self.save_requests.is_open

    def save_begins(self) -> None:
        """Record that a save begins: it honours the requests that were made before it."""
        if self.save_requests is not None:
            self.save_requests.save_begins()

    def saved(self) -> None:
        """Record that the last save is complete."""
        if self.save_requests is not None:
            self.save_requests.mark_honoured()

    def read_request(self, *, for_save: bool = True) -> StopRequest:
        """The request of the stop on which all ranks have agreed; sets ``request`` and ``in_time``. Collective.

        Args:
            for_save: whether a save may follow. Rank 0 then waits briefly for the supervisor's request if saves take
                long, because the request has the deadline.
        """
        if self.profiler is not None:
            self.profiler.abandon()
        seconds = self._clock.expected_save_seconds if for_save else None
        self.request, self.in_time = self._exit.request(save_seconds=seconds)
        return self.request

    def leave(self, outcome: Outcome, *, saved: bool) -> NoReturn:
        """Exit, to be continued or for good; see ``ProcessExit.leave``.

        Raises:
            SystemExit: always.
        """
        self._exit.leave(outcome, saved=saved)

    def complete(self, outcome: Outcome) -> None:
        """Write the outcome of a normal end; see ``ProcessExit.complete``."""
        self._exit.complete(outcome)

    def forget(self) -> None:
        """Remove the exit handlers; see ``ProcessExit.forget``."""
        self._exit.forget()
