"""How this process leaves: with a word to the supervisor, after meeting the other ranks, never in the middle of a step.

A program that ends well says ``completed``. One that was asked to stop says at which step and from which checkpoint it
goes on, and leaves by ``SystemExit``. One that dies of an exception says nothing: no word is a failure.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from hpcaccel.core.run_dir import atomic_write, make_folder, write_json
from hpcaccel.runtime.distributed.process_group import Group
from hpcaccel.runtime.distributed.thread_shutdown import settle
from hpcaccel.runtime.settings import Place

if TYPE_CHECKING:
    from hpcaccel.core.records import Outcome, StopRequest

__all__ = ["Ending"]

EXIT_TERMINATED = 143
"""As a process that SIGTERM ended: what a stop looks like where nothing could be saved."""


class Ending:
    """The last things.

    Args:
        at_end: called when the program ends by itself; it is to call ``complete``.
        deafen: called when nothing is left that a signal could ask for.
    """

    def __init__(
        self, place: Place, group: Group, at_end: Callable[[], None], deafen: Callable[[], None] = lambda: None
    ) -> None:
        self._place = place
        self._group = group
        self._at_end = at_end
        self._deafen = deafen
        self._failed = False
        self._left = False
        self._exiting = False
        self._take_back()
        self._hook = sys.excepthook
        sys.excepthook = self._note_failure
        atexit.register(self._at_exit)

    def request(self, *, save_seconds: float | None = None) -> tuple[StopRequest, bool]:
        """Why the ranks stop, as rank 0 read it, and whether there is time to save. Without a word from the supervisor
        the signal came straight from the cluster, which wants the nodes: then the training is to be continued.

        Args:
            save_seconds: what a save takes, as rank 0 knows; None where that is not known.
        """
        from hpcaccel.core.records import StopRequest, from_dict
        from hpcaccel.runtime.training.stop_request import fits, read_request

        request, in_time = StopRequest(reason="stop", then="requeue", time=0.0), True
        if self._group.is_main:
            found = read_request(self._place, save_seconds=save_seconds)
            request = request if found is None else from_dict(StopRequest, found)
            in_time = fits(request, save_seconds)
        answer: tuple[StopRequest, bool] = self._group.from_main((request, in_time))
        return answer

    def leave(self, outcome: Outcome, *, saved: bool) -> NoReturn:
        """Write the outcome, wait for all ranks, leave.

        Raises:
            SystemExit: always; 85 where the training can be continued.
        """
        self._deafen()
        self._write(outcome)
        self._group.meet()
        self._left = True
        from hpcaccel.core.records import EXIT_CONTINUED

        raise SystemExit(EXIT_CONTINUED if saved else EXIT_TERMINATED)

    def complete(self, outcome: Outcome) -> None:
        """Write the outcome of a program that ended well, meet the others and leave the group."""
        self._write(outcome)
        # At the exit whoever has not come may still be in a collective; in the middle of a script new groups follow.
        if self._group.meet_at_exit() or not self._exiting:
            self._group.leave()
        self.forget()

    def forget(self) -> None:
        """Nothing is written and nobody waited for when the program ends."""
        atexit.unregister(self._at_exit)
        # Somebody else's hook may have come on top of this one, and is left there.
        if sys.excepthook == self._note_failure:
            sys.excepthook = self._hook

    def _take_back(self) -> None:
        """An earlier training of this program said that it was complete. This one is not."""
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
        broken = None if self._group.exchange is None else self._group.exchange.rollcall.broken
        if broken is not None:
            self._leave_word(broken)
        self._group.say_failed(error)
        self._hook(kind, error, traceback)
        if broken is None:
            self._repeat_word()

    def _leave_word(self, text: str) -> None:
        """For ranks that wait in a collective of torch's own, and learn only that this one has gone. The store may go
        with it, the run directory does not."""
        run = self._place.run
        if run is not None:
            path = run.last_word(self._place.attempt)
            make_folder(path.parent)
            from hpcaccel.core.secret_masking import Mask

            atomic_write(path, Mask.of(run)(text), sync=False)

    def _repeat_word(self) -> None:
        """Say why another rank has given up, where this one failed for want of it."""
        if self._group.exchange is None:
            return
        word, run = self._group.exchange.rollcall.last_word(), self._place.run
        if word is None and run is not None:
            path = run.last_word(self._place.attempt)
            word = path.read_text() if path.exists() else None
        if word is not None:
            print(f"hpcaccel: another rank had given up: {word}", file=sys.stderr, flush=True)
            return
        for gone in self._group.exchange.rollcall.who_has_gone():
            print(f"hpcaccel: {gone}, and this rank waited for it", file=sys.stderr, flush=True)

    def _at_exit(self) -> None:
        self._exiting = True
        if self._left:
            self._group.leave()
        elif not self._failed:
            self._at_end()
            self._deafen()
        settle()
