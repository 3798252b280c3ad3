"""What scripts ask a prepared loader."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from hpcaccel.runtime.data.cursor import Cursor
from hpcaccel.runtime.data.global_batches import Told
from hpcaccel.runtime.data.sharding import Part, Sharing

__all__ = ["LoaderFacts"]


class LoaderFacts(DataLoader[Any]):
    """A loader's sizes, and what is known of the batch that it gave last. What is not known here, the user's own loader
    answers."""

    user_loader: DataLoader[Any]
    at_last_batch: bool
    _cursor: Cursor
    _sharing: Sharing
    _part: Part | None
    _told: Told

    def __getattr__(self, name: str) -> Any:
        if name == "user_loader":
            raise AttributeError(name)
        return getattr(self.user_loader, name)

    @property
    def trains(self) -> bool:
        """Whether optimizer steps follow its batches; such a loader ends early when the training is to finish."""
        return self._cursor.trains

    @trains.setter
    def trains(self, value: bool) -> None:
        self._cursor.trains = value

    @property
    def given_at_step(self) -> int:
        """Optimizer steps that were done when it gave its last batch."""
        return self._cursor.step

    @property
    def identity(self) -> int:
        """The same number for all views of one loader."""
        return id(self._cursor)

    @property
    def place(self) -> tuple[int, int]:
        """Which iteration of it this is, and how many batches it has given in it."""
        return self._cursor.place

    @property
    def end_of_dataloader(self) -> bool:
        return self.at_last_batch

    @property
    def valid_in_batch(self) -> int | None:
        """How many leading samples of the batch that came last are no repetitions; None: all."""
        return self._told.valid if self._part is None else self._part.valid(self._cursor.rounds)

    @property
    def batch_samples(self) -> int | None:
        """Samples in the batch that came last on this rank; None where nobody knows."""
        return self._told.samples if self._part is None else self._part.samples(self._cursor.rounds)

    @property
    def total_batch_size(self) -> int:
        """Samples in a batch of all ranks together.

        Raises:
            TypeError: the loader has no batch size.
        """
        if self._sharing.round is None:
            raise TypeError("this loader has batches of no fixed size, so there is no total_batch_size")
        return self._sharing.round

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset, on all ranks together."""
        found: Any = getattr(self.dataset, "total_length", None)
        return int(len(self.dataset) if found is None else found)  # type: ignore[arg-type]

    @property
    def remainder(self) -> int:
        """Samples in the last batch of all ranks together beyond full ones; -1 where nobody knows."""
        order = self._cursor.order
        units = None if order is None or not order.is_flat or self._sharing.drop_last else order.length
        return -1 if units is None else units % self.total_batch_size

    @property
    def iteration(self) -> int:
        """The number of the epoch that is being read, or comes next."""
        return self._cursor.epoch if self._cursor.running else self._cursor.next_epoch
