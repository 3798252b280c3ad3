"""How a stop request becomes one optimizer step at which all ranks leave.

A signal handler only sets a flag. The flags meet in an asynchronous max-reduce, issued at optimizer step k and read by
every rank at step k + 1: all ranks read the same words, so they decide the same at the same step, and no step waits.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from hpcaccel.runtime.training.child_signals import SIGNALS, shield_children

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.collectives.collective_watchdog import Rollcall

__all__ = ["BUSY", "DONE", "FAILED", "SIGNALS", "StopAgreement", "StopFlag", "Verdict", "WorkerInit", "signals_held"]

DONE, BUSY, FAILED = range(3)
"""A rank's word on the save in the background; of all ranks' words the largest counts."""


class StopFlag:
    """Set by SIGTERM and SIGUSR2, or by hand."""

    def __init__(self) -> None:
        self.raised = False
        self._installed = False

    def install(self) -> bool:
        """Take both signals; those that were held back since before the program began arrive now.

        Handlers can only be installed in the main thread. Elsewhere the mask is left as it is, and False comes back.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in SIGNALS:
            signal.signal(number, self._raise)
            # The flag is all that a signal does: no system call of the training needs to fail with EINTR for it.
            signal.siginterrupt(number, False)
        shield_children(self._raise)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._installed = True
        return True

    def deafen(self) -> None:
        """Hear no more: the process is on its way out. The interpreter gives the default back to every signal that it
        handles before it is gone, and a second SIGTERM then would end with 143 what has left with a word."""
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            for number in SIGNALS:
                if signal.getsignal(number) == self._raise:  # else the script has put its own there
                    signal.signal(number, signal.SIG_IGN)

    def clear(self) -> None:
        self.raised = False

    def _raise(self, number: int, frame: object) -> None:
        self.raised = True


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold both signals back while workers are started, which would die of them before they can ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class WorkerInit:
    """A data-loader worker's start: it ignores both signals (they go to a whole process group, and a dead worker would
    fail the training that is about to save), then does what the user's own ``worker_init_fn`` does."""

    user_function: Callable[[int], Any] | None

    def __call__(self, worker_id: int) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self.user_function is not None:
            self.user_function(worker_id)


class Verdict(NamedTuple):
    """What the ranks agreed on: whether any wants to stop or to save, and whether any is still in its loop."""

    stop: bool = False
    save: bool = False
    active: bool = True
    uneven: bool = False
    """Some ranks have read a loader to its end that others have not."""
    saving: int = 0
    """How far the ranks are with a save in the background: the largest of their words."""


class StopAgreement:
    """One tick an optimizer step on the control group; without a group the rank agrees with itself."""

    def __init__(self, control: dist.ProcessGroup | None, rollcall: Rollcall | None = None) -> None:
        self._control = control
        self._rollcall = rollcall
        self._number = 0
        self._own: Verdict | None = None
        """What a lone rank has said."""
        self._issued = 0
        self.times: list[int] = []
        """What the ranks said last of their own times, until somebody takes it."""
        self._words: torch.Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether this is a lone rank that has asked for nothing in its last tick: it need not ask again."""
        return self._own is _QUIET

    @property
    def pending(self) -> bool:
        """Whether a tick has been issued and not been read."""
        return self._own is not None or self._words is not None

    @property
    def gathers(self) -> bool:
        """Whether the next tick carries every rank's own time along. All ranks have issued equally many."""
        return self._control is not None and (self._issued + 1) % GATHER_EVERY == 0

    def issue(
        self, *, stop: bool, save: bool, active: bool = True, passes: int = 0, own: int | None = None, saving: int = 0
    ) -> None:
        """Say this rank's wishes. Every rank must issue as many ticks as it reads.

        Args:
            passes: how many loaders this rank has read to their ends without training on them.
            saving: ``DONE``, ``BUSY`` or ``FAILED``.
            own: microseconds that this rank takes for its own part of a step; given where ``gathers`` says so.
        """
        if self._control is None:
            self._own = (
                _QUIET if active and not (stop or save or saving) else Verdict(stop, save, active, saving=saving)
            )
            return
        most, least = (passes, passes) if active else (_FEWEST, _FEWEST)
        self._issued += 1
        words = [stop, save, active, most, -least, saving]
        if own is not None:
            words += self._placed(own)
        self._words = torch.tensor(words, dtype=torch.int32)
        if self._rollcall is not None:
            self._number = self._rollcall.enter(_CHANNEL)
        self._work = dist.all_reduce(self._words, op=dist.ReduceOp.MAX, group=self._control, async_op=True)

    def read(self) -> Verdict | None:
        """What all ranks said in the last tick, or None where there is none to read."""
        if self._control is None:
            own, self._own = self._own, None
            return own
        if self._words is None:
            return None
        if self._rollcall is not None:
            self._rollcall.wait(self._work, _WAITS_IN, channel=_CHANNEL, number=self._number)
        elif self._work is not None:
            self._work.wait()
        stop, save, active, most, least, saving, *times = self._words.tolist()
        if times:
            self.times = times
        self._words = self._work = None
        # Nothing is said of ranks that have left their loop: they have not come to what the others read.
        return Verdict(bool(stop), bool(save), bool(active), most > -least != _FEWEST, saving)

    def _placed(self, own: int) -> list[int]:
        """A number for each rank, of which only this one's is its own: the largest of all are all ranks' numbers."""
        numbers = [0] * dist.get_world_size(self._control)
        numbers[dist.get_rank(self._control)] = own
        return numbers


GATHER_EVERY = 50
"""So many ticks apart the ranks tell each other how long they take for their own part of a step."""
_QUIET = Verdict()
_FEWEST = -(1 << 30)
_CHANNEL = "ticks"
_WAITS_IN = "a step of the training loop"
