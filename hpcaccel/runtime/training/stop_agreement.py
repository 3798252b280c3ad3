"""``StopAgreement`` and ``AgreedActions``: all ranks save and stop at the same optimizer step.

A signal handler only sets a flag. An asynchronous all-reduce combines the ranks' flags: each rank issues it at
optimizer step k, and reads its result at step k + 1. All ranks read the same value, so they take the same decision at
the same step. A rank's flags are bits of one integer, because on 4 ranks gloo reduces one number in a third of the time
that it needs for six. More than ``wide_groups.WIDE`` ranks reduce along a tree, others along gloo's ring.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcaccel.runtime.distributed import wide_groups

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from hpcaccel.runtime.distributed.collectives.collective_watchdog import CollectiveWatchdog
    from hpcaccel.runtime.training.agreed_stop import AgreedStop
    from hpcaccel.runtime.training.loop_context import LoopContext
    from hpcaccel.runtime.training.save_schedule import SaveSchedule
    from hpcaccel.runtime.training.training_end import TrainingEnd

__all__ = ["BUSY", "DONE", "FAILED", "AgreedActions", "StopAgreement", "StopDecision"]

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
        self._values: torch.Tensor | None = None
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
    ) -> None:
        """Start the reduction of this rank's values. Every rank must issue as many agreements as it reads.

        Args:
            passes: number of loaders that this rank has read to the end without training on them.
            own: this rank's own time per step in microseconds; given only if ``gathers`` is True.
            saving: progress of this rank's background save: ``DONE``, ``BUSY`` or ``FAILED``.
            snapshot: whether a snapshot in memory is due.
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
        saving=FAILED if bits & _SAVE_FAILED else BUSY if bits & _SAVE_BUSY else DONE,
    )


def _bitwise_or(
    control: dist.ProcessGroup,
) -> tuple[Callable[[list[int]], tuple[torch.Tensor, dist.Work | None]], int, int]:
    """Returns three values for the group ``control``: a function that starts a bitwise-OR all-reduce, this process's
    rank, and the number of ranks."""
    import torch  # imported here, because a program with one process may not have torch
    import torch.distributed as dist

    def start(values: list[int]) -> tuple[torch.Tensor, dist.Work | None]:
        tensor = torch.tensor(values, dtype=torch.int64)
        return tensor, dist.all_reduce(tensor, op=dist.ReduceOp.BOR, group=control, async_op=True)

    rank, ranks = dist.get_rank(control), dist.get_world_size(control)
    if ranks <= wide_groups.WIDE:
        return start, rank, ranks
    store = dist.PrefixStore(f"hpcaccel/agreement/{next(_trees)}", dist.distributed_c10d._get_default_store())
    tree = wide_groups.RankTree(store, rank, ranks, timeout=timedelta(seconds=TREE_TIMEOUT_SECONDS))

    def start_in_tree(values: list[int]) -> tuple[torch.Tensor, Any]:
        tensor = torch.tensor(values, dtype=torch.int64)
        return tensor, tree.reduce(tensor, dist.ReduceOp.BOR)

    return start_in_tree, rank, ranks


TREE_TIMEOUT_SECONDS = 1800.0
"""Timeout of the groups in which more than ``wide_groups.WIDE`` ranks agree; as that of the control group."""
_trees = count()
"""Numbers of the trees that this process has made; the same on all ranks."""


GATHER_EVERY = 50
"""Number of agreements between two exchanges of own times."""
_STOP, _SAVE, _SAVE_BUSY, _SAVE_FAILED, _ACTIVE, _INACTIVE = (1 << bit for bit in range(6))
_PASS_BIT, _PASSES = 6, 32
_SNAPSHOT = 1 << _PASS_BIT + _PASSES
"""An active rank sets the bit ``_PASS_BIT + passes % _PASSES``: ranks with different passes set different bits."""
_CHANNEL = "ticks"
_WAITS_IN = "a step of the training loop"


class AgreedActions:
    """Agrees with the other ranks at each step, and carries out the agreement: saves and stops."""

    def __init__(self, context: LoopContext, stop: AgreedStop, saves: SaveSchedule, end: TrainingEnd) -> None:
        self._counters = context.counters
        self._flag = context.flag
        self._in_use = context.in_use
        self._own_time = context.own_time
        self._checkpoints = context.checkpoints
        self._group = context.group
        self._saves = saves
        self._snapshots = saves.snapshots
        self._end = end
        self._profiler, self._requests = stop.profiler, stop.save_requests
        self._agreement = stop.agreement

    def begin(self) -> None:
        """Issue the first agreement of a loop, unless one is pending."""
        if not self._agreement.pending:
            self._issue()

    def at_step(self, step: int) -> None:
        """Carry out the agreement of the previous step when ``step`` is over, and issue the next one.

        Raises:
            SystemExit: the ranks have agreed on a stop after which the training is to be continued.
            CheckpointError: a save failed.
        """
        if self._profiler is not None and self._profiler.is_active:
            self._profiler.at_step(step)
        agreement, own_time = self._agreement, self._own_time
        if agreement.is_quiet:
            saves, following = self._saves, step + 1
            if not (
                self._flag.raised
                or following >= saves.due_step
                or following >= self._snapshots.due_step
                or monotonic() >= saves.due_time
                or (self._requests is not None and self._requests.names and saves.is_requested)
            ):
                return
        decision = agreement.read()
        if decision is not None:
            if decision.uneven:
                self._in_use.warn_of_uneven_passes(self._group)
            if decision.stop or decision.save or decision.snapshot or self._checkpoints.in_flight:
                self._act(decision)
        if own_time is not None and agreement.times:
            own_time.record_all(step, agreement.times)
            agreement.times = []
        self._issue()
        if own_time is not None:
            own_time.step_is_over()

    def at_once(self) -> None:
        """Agree now, wait for the result, and carry it out. Collective."""
        before = self._agreement.read() or StopDecision()
        self._issue()
        now = self._agreement.read() or StopDecision()
        if before.stop or now.stop or before.save or now.save or self._checkpoints.in_flight:
            self._act(now._replace(stop=before.stop or now.stop, save=before.save or now.save))
        self._issue()

    def until_all_have_left(self) -> None:
        """Issue and read agreements as an inactive rank, after this rank has left its loop, until all have left."""
        inactive = False
        while True:
            decision = self._agreement.read()
            if decision is not None:
                self._act(decision)
                if inactive and not decision.active:
                    return
            self._issue(active=False)
            inactive = True

    def _issue(self, *, active: bool = True) -> None:
        if self._flag.raised:
            self._checkpoints.hurry()  # the save of the stop will wait for the one in flight
        own_time = self._own_time
        self._agreement.issue(
            stop=self._flag.raised,
            save=active and self._saves.is_due(self._counters.step + 1),
            active=active,
            passes=self._in_use.passes,
            own=own_time.take() if own_time is not None and self._agreement.gathers else None,
            saving=self._saves.background_progress,
            snapshot=active and self._counters.step + 1 >= self._snapshots.due_step,
        )
        if self._checkpoints.in_flight:
            self._agreement.is_quiet = False  # look at each step whether it has ended

    def _act(self, decision: StopDecision) -> None:
        if self._checkpoints.in_flight and decision.saving != BUSY:
            self._saves.finish_background(failed=decision.saving == FAILED)
        if decision.stop:
            self._checkpoints.hurry()
            self._end.stop()
        if decision.snapshot:
            self._snapshots.take()
        if decision.save:
            self._saves.due()
