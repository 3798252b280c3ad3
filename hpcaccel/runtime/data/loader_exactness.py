"""What speaks against a prepared loader giving the same batches after a resume."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler

from hpcaccel.runtime.data.inner_loader import Plan
from hpcaccel.runtime.data.loader_attributes import LoaderFacts
from hpcaccel.runtime.data.seeded_stream import is_stateful
from hpcaccel.runtime.data.streaming import TellingStream
from hpcaccel.runtime.training.script_generators import generators_in

__all__ = ["LoaderPromise"]


class LoaderPromise(LoaderFacts):
    """A loader that is asked what it can promise; see ``Exactness``."""

    changes: tuple[str, ...] = ()
    """What has changed since the checkpoint that was loaded."""
    dispatch_batches: bool
    _plan: Plan
    _stream: TellingStream

    def reads_with(self, iterator: Any) -> bool:
        """Whether it is this loader's inner one that made ``iterator``."""
        if self._cursor.order is None:
            return bool(iterator._dataset is self._stream.dataset)
        return iterator._index_sampler is self._plan

    @property
    def reading(self) -> dict[str, Any]:
        """What the batches depend on beside seed and place."""
        user, order = self.user_loader, self._cursor.order
        # A map-style batch is seeded by its place, whichever worker reads it.
        workers = {"num_workers": user.num_workers} if order is None else {"workers": user.num_workers > 0}
        return {
            **workers,
            "batch_size": user.batch_size,
            "samples": None if order is None else order.length,
            "dispatch_batches": self.dispatch_batches,
        }

    def changes_since(self, then: dict[str, Any]) -> tuple[str, ...]:
        """How this loader reads otherwise than the one did that was saved."""
        now = self.reading
        return tuple(
            f"a DataLoader's {name}: {then[name]} then, {now[name]} now"
            for name in now
            if name in then and then[name] != now[name]
        )

    @property
    def own_parts(self) -> dict[str, Any]:
        """The user's objects that read the data and have no state that is saved."""
        user = self.user_loader
        sampler: Any = user.batch_sampler if user.batch_sampler is not None else user.sampler
        if type(sampler) is BatchSampler:
            sampler = sampler.sampler
        parts: dict[str, Any] = {"dataset": user.dataset, "collate_fn": user.collate_fn}
        if type(sampler).__module__.partition(".")[0] not in ("torch", "hpcaccel", "torchdata"):
            parts["sampler"] = sampler
        saved = self.saved_parts
        return {name: part for name, part in parts.items() if not any(part is one for one in saved)}

    @property
    def saved_parts(self) -> list[Any]:
        """The user's objects whose states its own state holds."""
        order = self._cursor.order
        if order is not None:
            return [*self.saved_generators, order.stateful]
        is_marked = self._stream.bookmarks is not None and is_stateful(self.user_loader.dataset)
        return [*self.saved_generators, *([self.user_loader.dataset] if is_marked else [])]

    @property
    def saved_generators(self) -> list[Any]:
        """The user's generators whose states its own state holds."""
        found = self._cursor.generator
        return [] if found is None else [found]

    @property
    def doubt(self) -> str | None:
        """Why it cannot promise the same batches after a resume; None: it can."""
        user, is_stream = self.user_loader, self._cursor.order is None
        if is_stream and not self._stream.is_known:
            return f"nobody knows how a {type(user).__qualname__} reads its data"
        if not user.num_workers:
            return None
        # Workers draw from copies, which begin anew with each process: as they did, where each epoch has workers of its
        # own that read it from its beginning.
        repeated = is_stream and not user.persistent_workers and not self._stream.is_stateful_loader
        saved = self.saved_generators if repeated else []
        copied = [
            name
            for part, thing in self.own_parts.items()
            if part != "sampler"
            for name, generator in generators_in(thing, part)
            if not any(generator is one for one in saved)
        ]
        return (
            f"workers draw from copies of a generator that is in no checkpoint: {', '.join(copied)}" if copied else None
        )
