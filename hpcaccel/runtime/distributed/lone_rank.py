"""``LoneRank``: takes the place of ``RankGroup`` in a program that has no process group. Does not import torch."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["LoneRank"]

T = TypeVar("T")


class LoneRank:
    """A process that does not coordinate with any other.

    Args:
        rank: its rank. Only rank 0 writes the run's files, even if other processes run beside it.
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
