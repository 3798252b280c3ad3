"""Collective steps of a save or load. An error on one rank is raised on all ranks, so that no rank waits forever.

Errors are sent as text: pickling or unpickling an exception object may fail, and the other ranks would wait forever.

Values travel to rank 0 and back along a binomial tree (``object_tree``): the number of messages that one rank sends or
receives grows with the logarithm of the number of ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist

from hpcaccel.checkpoint import object_tree
from hpcaccel.errors import CheckpointError, Damaged

__all__ = ["CheckpointRanks", "Damaged"]

T = TypeVar("T")
R = TypeVar("R")


class Ranks(Protocol):
    """The ranks of a training, as ``runtime.distributed.process_group.RankGroup`` describes them."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def control(self) -> dist.ProcessGroup | None:
        """A gloo group."""


class CheckpointRanks:
    """The ranks that save and load together.

    Args:
        rank: this process's rank.
        world_size: number of ranks; with 1 no process group is used.
        group: a gloo process group; None means the default group.
    """

    def __init__(self, *, rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group

    @classmethod
    def of(cls, group: Ranks) -> CheckpointRanks:
        """The ranks of a training."""
        return cls(rank=group.rank, world_size=group.world_size, group=group.control)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value on all ranks; the other ranks' values are ignored."""
        if self.world_size == 1:
            return cast(T, value)
        return object_tree.broadcast(value, self._group)

    def run(self, what: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank.

        Returns:
            This rank's own result.

        Raises:
            CheckpointError: on all ranks, if ``work`` failed on any of them.
        """
        value, problem = _attempt(work)
        failed = self._gather({} if problem is None else {self.rank: problem})
        if failed := self.broadcast(failed):
            raise self._error(what, failed)
        return cast(T, value)

    def first(self, what: str, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 and return its value on all ranks.

        Raises:
            CheckpointError: on all ranks, if ``work`` failed.
        """
        value, problem = _attempt(work) if self.is_first else (None, None)
        value, problem = self.broadcast((value, problem))
        if problem is not None:
            raise self._error(what, {0: problem})
        return cast(T, value)

    def reduce(self, what: str, work: Callable[[], T], merge: Callable[[list[T]], R]) -> R:
        """Run ``work`` on every rank, ``merge`` the values on rank 0, and return the result on all ranks.

        Raises:
            CheckpointError: on all ranks, if ``work`` failed on any rank (``merge`` is then not run) or ``merge``
                failed.
        """
        merged, problems = self.broadcast(self._merged(work, merge))
        if problems:
            raise self._error(what, problems)
        return cast(R, merged)

    def fold(self, what: str, work: Callable[[], T], combine: Callable[[T, T], T], conclude: Callable[[T], R]) -> R:
        """Like ``reduce``, but values are combined two at a time on their way to rank 0, so that no message grows with
        the number of ranks. ``conclude`` gets the combination of all.

        Args:
            combine: must not raise.
        """

        def joined(one: Outcome[T], other: Outcome[T]) -> Outcome[T]:
            problems = {**one[1], **other[1]}
            return (None if problems else combine(cast(T, one[0]), cast(T, other[0]))), problems

        value, problem = _attempt(work)
        outcome: Outcome[T] | None = (value, {} if problem is None else {self.rank: problem})
        if self.world_size > 1:
            outcome = object_tree.fold(cast(Any, outcome), joined, self._group)
        concluded: R | None = None
        problems: dict[int, Problem] = {}
        if outcome is not None:
            combined, problems = outcome
            if not problems:
                concluded, problem = _attempt(lambda: conclude(cast(T, combined)))
                problems = {} if problem is None else {0: problem}
        concluded, problems = self.broadcast((concluded, problems))
        if problems:
            raise self._error(what, problems)
        return cast(R, concluded)

    def reduce_scatter(self, what: str, work: Callable[[], T], merge: Callable[[list[T]], Sequence[R]]) -> R:
        """Like ``reduce``, but rank ``i`` gets item ``i`` of the list that ``merge`` returns."""
        merged, problems = self._merged(work, merge)
        if self.world_size > 1:
            parts = None
            if self.is_first:
                parts = {i: (None if problems else cast(Any, merged)[i], problems) for i in range(self.world_size)}
            part, problems = object_tree.scatter(parts, self._group)
        else:
            part = None if problems else cast(Any, merged)[0]
        if problems:
            raise self._error(what, problems)
        return cast(R, part)

    def exchange(self, tensor: Any, *, source: int, target: int) -> None:
        """Send ``tensor`` from rank ``source`` to rank ``target``, in place. Other ranks do nothing."""
        for rank, call, other in ((source, dist.send, target), (target, dist.recv, source)):
            if self.rank == rank:
                call(tensor, other if self._group is None else dist.get_global_rank(self._group, other), self._group)

    def _merged(self, work: Callable[[], T], merge: Callable[[list[T]], R]) -> tuple[R | None, dict[int, Problem]]:
        outcomes = self._gather({self.rank: _attempt(work)})
        if outcomes is None:
            return None, {}
        problems = {rank: problem for rank, (_, problem) in outcomes.items() if problem is not None}
        if problems:
            return None, problems
        merged, problem = _attempt(lambda: merge([cast(T, outcomes[rank][0]) for rank in range(self.world_size)]))
        return merged, {} if problem is None else {0: problem}

    def _gather(self, values: dict[int, T]) -> dict[int, T] | None:
        """On rank 0 the ``values`` of all ranks, by rank; on the other ranks None."""
        return values if self.world_size == 1 else object_tree.gather(values, self._group)

    def _error(self, what: str, problems: dict[int, Problem]) -> CheckpointError:
        """Combine the errors of all ranks into one. Identical messages from several ranks appear once."""
        by_text: dict[str, list[str]] = {}
        for rank, (text, host, _) in sorted(problems.items()):
            by_text.setdefault(text, []).append(f"rank {rank} on {host}")
        parts = []
        for text, where in by_text.items():
            more = f" and {len(where) - 1} more" if len(where) > 1 else ""
            parts.append(text if self.world_size == 1 else f"{text} ({where[0]}{more})")
        kind = Damaged if any(damaged for _, _, damaged in problems.values()) else CheckpointError
        return kind(f"{what}: " + "; ".join(parts))


Problem = tuple[str, str, bool]
"""A rank's error: message, host name, and whether the error is ``Damaged``."""
Outcome = tuple[T | None, dict[int, Problem]]
"""The combined value of some ranks, or their errors by rank."""


def _attempt(work: Callable[[], T]) -> tuple[T | None, Problem | None]:
    try:
        return work(), None
    except Exception as error:  # the other ranks must receive any error
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return None, (text, socket.gethostname(), isinstance(error, Damaged))
