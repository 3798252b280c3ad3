"""``StopAgreement``: the ranks agree at an optimizer step on stops and saves.

A signal handler only sets a flag. An asynchronous all-reduce combines the ranks' flags: each rank issues it at
optimizer step k, and reads its result at step k + 1. All ranks read the same value, so they take the same decision at
the same step. If steps are short, the ranks agree only at some of them (``agreed_actions``): rank 0 proposes after how
many steps next, and its proposal travels with the flags. A rank's flags are bits of one integer, because on 4 ranks
gloo reduces one number in a third of the time that it needs for six. More than ``wide_groups.WIDE`` ranks reduce along
a tree, others along gloo's ring.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccel.runtime.distributed import wide_groups

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from hpcaccel.runtime.distributed.collectives.collective_watchdog import CollectiveWatchdog

__all__ = ["BUSY", "DONE", "FAILED", "MOST_STEPS", "StopAgreement", "StopDecision"]

DONE, BUSY, FAILED = range(3)
"""Progress of a rank's background save. The ranks agree on the largest value."""


class StopDecision(NamedTuple):
    """Result of an agreement of the ranks: whether any rank has to stop or save, or is still in its loop."""

    stop: bool = False
    save: bool = False
    active: bool = True
    uneven: bool = False
    """Whether only some of the ranks have read a loader to its end."""
    saving: int = 0
    """Progress of the background save: the largest of all ranks' values."""
    snapshot: bool = False
    """Whether any rank's snapshot in memory is due."""
    steps: int = 1
    """After how many steps the result of the next agreement is read; rank 0's proposal."""


class StopAgreement:
    """Does one reduction per optimizer step on the control group. Without a group, returns the rank's own values."""

    def __init__(self, control: dist.ProcessGroup | None, watchdog: CollectiveWatchdog | None = None) -> None:
        self._control = control
        self._watchdog = watchdog
        if control is not None:
            self._reduce, self._rank, self._world_size = _bitwise_or(control)
        self._number = 0
        self._own: StopDecision | None = None
        """The last values of a rank without a group."""
        self.is_quiet = False
        """Whether no action was due at the last ``issue`` of a rank without a group, and no save was in progress. The
        result of that ``issue`` then stays valid."""
        self._issued = 0
        self.times: list[int] = []
        """All ranks' own times, from the last agreement that contained them; emptied by the caller after use."""
        self._values: array[int] | torch.Tensor | None = None
        self._work: dist.Work | None = None

    @property
    def pending(self) -> bool:
        """Whether an agreement was issued but not read."""
        return self._own is not None or self._values is not None

    @property
    def gathers(self) -> bool:
        """Whether the next agreement contains every rank's own time. The value is the same on all ranks, because they
        have issued the same number of agreements."""
        return self._control is not None and (self._issued + 1) % GATHER_EVERY == 0

    def issue(
        self,
        *,
        stop: bool,
        save: bool,
        active: bool = True,
        passes: int = 0,
        own: int | None = None,
        saving: int = 0,
        snapshot: bool = False,
        steps: int = 1,
    ) -> None:
        """Start the reduction of this rank's values. Every rank must issue as many agreements as it reads.

        Args:
            passes: number of loaders that this rank has read to the end without training on them.
            own: this rank's own time per step in microseconds; given only if ``gathers`` is True.
            saving: progress of this rank's background save: ``DONE``, ``BUSY`` or ``FAILED``.
            snapshot: whether a snapshot in memory is due.
            steps: rank 0's proposal of when to read the next agreement; other ranks' values do not count.
        """
        if self._control is None:
            self.is_quiet = active and not (stop or save or saving or snapshot)
            self._own = StopDecision(stop, save, active, saving=saving, snapshot=snapshot)
            return
        self._issued += 1
        bits = (
            (_STOP if stop else 0)
            | (_SAVE if save else 0)
            | (_SNAPSHOT if snapshot else 0)
            | (_SAVE_BUSY if saving == BUSY else _SAVE_FAILED if saving == FAILED else 0)
            | (_ACTIVE | 1 << (_PASS_BIT + passes % _PASSES) if active else _INACTIVE)
            | (steps - 1 << _STEPS_BIT if self._rank == 0 else 0)
        )
        values = [bits] if own is None else [bits, *self._in_rank_order(own)]
        if self._watchdog is not None:
            self._number = self._watchdog.enter(_CHANNEL)
        self._values, self._work = self._reduce(values)

    def read(self) -> StopDecision | None:
        """Wait for the last agreement that was issued, and return its result; None if there is none to read."""
        if self._control is None:
            own, self._own, self.is_quiet = self._own, None, False
            return own
        if self._values is None:
            return None
        if self._watchdog is not None:
            self._watchdog.wait(self._work, _WAITS_IN, channel=_CHANNEL, number=self._number)
        elif self._work is not None:
            self._work.wait()
        bits, *times = self._values.tolist()
        if times:
            self.times = times
        self._values = self._work = None
        return _decision(bits)

    def _in_rank_order(self, own: int) -> list[int]:
        """A list with ``own`` at this rank's index and zeros elsewhere. The bitwise OR of all lists has all values."""
        numbers = [0] * self._world_size
        numbers[self._rank] = own
        return numbers


def _decision(bits: int) -> StopDecision:
    """The decision that the bitwise OR of all ranks' flags encodes."""
    passes = bits >> _PASS_BIT & (1 << _PASSES) - 1
    return StopDecision(
        stop=bool(bits & _STOP),
        save=bool(bits & _SAVE),
        active=bool(bits & _ACTIVE),
        # Not compared once a rank has left its loop: it has not reached the same loaders.
        uneven=not bits & _INACTIVE and passes & passes - 1 != 0,
        snapshot=bool(bits & _SNAPSHOT),
        steps=1 + (bits >> _STEPS_BIT & MOST_STEPS - 1),
        saving=FAILED if bits & _SAVE_FAILED else BUSY if bits & _SAVE_BUSY else DONE,
    )


def _bitwise_or(
    control: dist.ProcessGroup,
) -> tuple[Callable[[list[int]], tuple[array[int] | torch.Tensor, Any]], int, int]:
    """Returns three values for the group ``control``: a function that starts a bitwise-OR all-reduce, this process's
    rank, and the number of ranks.

    The function returns where the result will be once the pending work, which it returns as well, is over. A single
    number is reduced in memory that the next call uses again: making and reading a tensor takes some 0.06 ms between
    steps of a training, whose code and data have replaced it in the processor's caches.
    """
    import torch  # imported here, because a program with one process may not have torch
    import torch.distributed as dist

    one = array("q", [0])
    memory = torch.frombuffer(one, dtype=torch.int64)

    rank, ranks = dist.get_rank(control), dist.get_world_size(control)
    reduce: Callable[[torch.Tensor], Any]
    if ranks <= wide_groups.WIDE:
        reduce = partial(dist.all_reduce, op=dist.ReduceOp.BOR, group=control, async_op=True)
    else:
        store = dist.PrefixStore(f"hpcaccel/agreement/{next(_trees)}", dist.distributed_c10d._get_default_store())
        tree = wide_groups.RankTree(store, rank, ranks, timeout=timedelta(seconds=TREE_TIMEOUT_SECONDS))
        reduce = partial(tree.reduce, op=dist.ReduceOp.BOR)

    def start(values: list[int]) -> tuple[array[int] | torch.Tensor, Any]:
        if len(values) > 1:
            tensor = torch.tensor(values, dtype=torch.int64)
            return tensor, reduce(tensor)
        one[0] = values[0]
        return one, reduce(memory)

    return start, rank, ranks


TREE_TIMEOUT_SECONDS = 1800.0
"""Timeout of the groups in which more than ``wide_groups.WIDE`` ranks agree; as that of the control group."""
_trees = count()
"""Numbers of the trees that this process has made; the same on all ranks."""


MOST_STEPS = 32
"""Largest number of steps between two agreements, a power of two. If steps suddenly take much longer, a stop may have
to wait for so many of them."""
GATHER_EVERY = 50
"""Number of agreements between two exchanges of own times."""
_STOP, _SAVE, _SAVE_BUSY, _SAVE_FAILED, _ACTIVE, _INACTIVE = (1 << bit for bit in range(6))
_PASS_BIT, _PASSES = 6, 32
_SNAPSHOT = 1 << _PASS_BIT + _PASSES
"""An active rank sets the bit ``_PASS_BIT + passes % _PASSES``: ranks with different passes set different bits."""
_STEPS_BIT = _PASS_BIT + _PASSES + 1
"""First of the bits of rank 0's proposal, of which ``MOST_STEPS`` determines the number."""
_CHANNEL = "ticks"
_WAITS_IN = "a step of the training loop"
