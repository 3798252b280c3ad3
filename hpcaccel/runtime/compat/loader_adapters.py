"""Accelerate's base classes for loaders that a script defines: a loader around a DataLoader, and the methods that make
it the loader in use. Prepared loaders count as instances of both, although they have a class of their own."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from hpcaccel.runtime.data.inner_loader import is_stateful
from hpcaccel.runtime.data.loader_base import LoaderFacts
from hpcaccel.runtime.data.sharding import with_last
from hpcaccel.runtime.states.gradient_state import GradientState

__all__ = ["DataLoaderAdapter", "DataLoaderStateMixin", "SkipDataLoader"]


class DataLoaderStateMixin(metaclass=ABCMeta):
    """Base class of loaders that a script iterates over by hand: between ``begin`` and ``end`` the loader is the active
    one of ``gradient_state``, an attribute that the subclass creates.

    A subclass sets ``end_of_dataloader`` before it returns its last batch, which then ends in an optimizer step.
    """

    gradient_state: GradientState
    end_of_dataloader: bool = False
    remainder: int = -1
    """Number of samples in the epoch's last, incomplete round of all ranks; 0 if it is complete, -1 if unknown."""

    def reset(self) -> None:
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Make this the active loader. Computes ``remainder`` if the loader has ``dataset``, ``total_batch_size`` and a
        ``_drop_last`` that is false."""
        self.reset()
        loader: Any = self
        if not getattr(loader, "_drop_last", True) and hasattr(loader, "total_batch_size"):
            length = getattr(loader.dataset, "total_dataset_length", None)
            if length is not None or hasattr(loader.dataset, "__len__"):
                self.remainder = (len(loader.dataset) if length is None else length) % loader.total_batch_size
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Restore the loader that was active before ``begin``."""
        self.gradient_state._remove_dataloader(self)


class DataLoaderAdapter(DataLoader[Any], metaclass=ABCMeta):
    """A DataLoader around another one, ``base_dataloader``, whose attributes it has.

    Args:
        use_stateful_dataloader: whether ``base_dataloader`` is torchdata's StatefulDataLoader, which adds
            ``state_dict`` and ``load_state_dict``.
        kwargs: further arguments of DataLoader.

    Raises:
        ImportError: ``use_stateful_dataloader`` is set, but torchdata is not installed.
    """

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        made: type[DataLoader[Any]] = DataLoader
        if use_stateful_dataloader:
            from torchdata.stateful_dataloader import StatefulDataLoader as made  # type: ignore[import-not-found, import-untyped, no-redef, unused-ignore]
        base = made(dataset, batch_sampler=batch_sampler, **kwargs)
        # DataLoader.__init__ is not called: it would build the samplers again.
        self.__dict__.update(base.__dict__)
        self.use_stateful_dataloader = use_stateful_dataloader
        self.base_dataloader = base

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":  # not created yet
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(self.base_dataloader)


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A DataLoader that reads and discards its first ``skip_batches`` batches in each iteration.

    ``skip_first_batches`` does not read the skipped samples of map-style data.

    Args:
        use_stateful_dataloader, kwargs: see ``DataLoaderAdapter``.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches
        self.gradient_state = GradientState()

    def __len__(self) -> int:
        return max(super().__len__() - self.skip_batches, 0)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.begin()
        try:
            batches = islice(super().__iter__(), self.skip_batches, None)
            # To know the last batch, the next one is read ahead, which the state of a stateful loader would contain.
            ahead = not is_stateful(self.base_dataloader)
            for batch, is_last in with_last(batches) if ahead else ((batch, False) for batch in batches):
                self.end_of_dataloader = is_last
                yield batch
        finally:
            self.end()


DataLoaderAdapter.register(LoaderFacts)
DataLoaderStateMixin.register(LoaderFacts)
