"""A stop gate for ranks that work independently, such as in batch inference.

With ``stop_gate()`` all ranks take their steps together, so that each step takes as long as on the slowest rank. Here
no rank waits for another one before all work is done:

1. *Stop.* A rank that receives a stop signal sets a key of the ranks' store. Each rank reads that key before it starts
   a piece of work (``must_stop``), so all ranks stop, each after its current piece.
2. *Progress.* After each piece a rank increments a counter in the store (``count``). Its value, plus the number of
   pieces done in earlier attempts, is the run's step.
3. *Meeting.* ``meet`` waits until all ranks have stopped or have no work left. Because ranks may be hours apart, this
   has no time limit; it ends with an error if a rank has failed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hpcaccel.errors import RankFailed, RuntimeMisuse
from hpcaccel.runtime.training import stop_gate as gates
from hpcaccel.runtime.training.stop_gate import StopGate, has_accelerator

if TYPE_CHECKING:
    from hpcaccel.runtime.distributed.process_group import RankGroup
    from hpcaccel.runtime.training.process_exit import LoneRank
    from hpcaccel.runtime.training.stop_agreement import StopAgreement

__all__ = ["IndependentGate", "independent_gate"]


def independent_gate(what: str) -> IndependentGate:
    """The independent gate of this process; later calls return the same gate until it is over.

    Args:
        what: name of the caller, for the message of the error.

    Raises:
        RuntimeMisuse: this process has an Accelerator or a ``stop_gate()``, which stops the ranks in another way.
        RankEnvironmentError: the process groups cannot be formed.
    """
    if has_accelerator():
        raise RuntimeMisuse(
            f"{what}: this process has an Accelerator, whose training loop handles stop requests itself. Create "
            "hpcaccel.PartialState() instead: it has split_between_processes, gather and the device, too"
        )
    gate = gates._gate
    if gate is not None and not gate.is_over:
        if isinstance(gate, IndependentGate):
            return gate
        raise RuntimeMisuse(
            f"{what}: this process has called hpcaccel.stop_gate(). Remove that call: {what} handles stop requests "
            "itself"
        )
    gate = gates._gate = IndependentGate()
    return gate


class IndependentGate(StopGate):
    """Stops ranks that do different numbers of steps. Created by ``independent_gate``."""

    def __init__(self) -> None:
        super().__init__()
        self._round = 0
        """Number of calls of ``begin_work``; part of the keys in the ranks' store."""
        self._done_before = 0
        self._counted = 0

    @property
    def group(self) -> RankGroup | LoneRank:
        """The ranks. The first use forms the group."""
        return self.join()

    def begin_work(self, *, done: int, total: int, checkpoint: str | None) -> None:
        """Record where this attempt starts. Collective.

        Args:
            done: number of pieces of work that earlier attempts have done.
            total: number of pieces of the whole work.
            checkpoint: folder of the earlier attempts' results; None if there are none.
        """
        self._round += 1
        self._done_before, self._counted = done, 0
        self._has_finished = False
        self.begin(done, checkpoint=checkpoint, total_steps=total)

    def must_stop(self) -> bool:
        """Whether this rank must not start another piece of work, because this or another rank was signalled.

        Raises:
            RankFailed: the connection to rank 0 was lost.
        """
        store = self._store
        if self._status.phase != "training":  # the work begins here, after a model was loaded
            self._status.train(self._step)
        if store is None:
            return self._flag.raised
        try:
            self._pass_on()
            return bool(store.check([self._key("stop")]))
        except RuntimeError as error:
            raise RankFailed(f"rank {self._group.rank} lost the connection to the ranks' store: {error}") from error

    def count(self) -> None:
        """Record that this rank has done a piece of work. Its result must be on the disk by now."""
        store = self._store
        self._counted = self._counted + 1 if store is None else int(store.add(self._key("done"), 1))
        self._reach(self._done_before + self._counted)

    def meet(self, *, stopped: bool = False) -> bool:
        """Wait, without a time limit, until all ranks have called this. Collective.

        Args:
            stopped: whether this rank has left work undone because ``must_stop`` returned True.

        Returns:
            Whether any rank has left work undone.

        Raises:
            RankFailed: a rank has failed.
        """
        exchange = self.group.exchange
        if exchange is None:
            return stopped
        # A rank that waits here may be the only one that was signalled, so it passes the request on.
        problem = exchange.watchdog.end_barrier.wait(math.inf, at_each_poll=self._pass_on)
        if problem is not None:
            raise RankFailed(f"rank {self._group.rank} stopped waiting for the other ranks: {problem}")
        return any(exchange.call("the end of the work", value=int(stopped)).values)

    def _pass_on(self) -> None:
        if self._flag.raised:
            self._store.set(self._key("stop"), "")

    def stop_now(self, *, done: int, checkpoint: str) -> None:
        """Exit the program because of a stop request. Collective.

        Args:
            done: number of pieces of work that are done.
            checkpoint: folder of the results.

        Raises:
            SystemExit: always; the exit codes are those of ``StopGate.leave``.
        """
        self._reach(done)
        self._stop()
        self.leave(checkpoint=checkpoint)

    def finish(self, *, done: int) -> None:
        """Record that all work is done: a stop that was requested changes nothing any more.

        Args:
            done: number of pieces of work.
        """
        self._reach(done)
        self.complete()

    @property
    def _store(self) -> Any:
        """The ranks' store; None for a single process."""
        return getattr(self.group, "store", None)

    def _key(self, name: str) -> str:
        return f"independent/{self._round}/{name}"

    def _join_ranks(self) -> RankGroup | LoneRank:
        """The ranks of ``PartialState()``, which is created if there is none."""
        from hpcaccel.runtime.distributed.world import World

        return World.current().group

    def _issue_first(self, agreement: StopAgreement) -> None:
        """Do nothing: these ranks make no agreements."""
