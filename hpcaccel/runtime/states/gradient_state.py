"""``GradientState``: state of gradient accumulation and of the loader in use."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar

from hpcaccel.runtime.states.partial_state import SharedState
from hpcaccel.runtime.training.accumulation import Accumulation
from hpcaccel.runtime.training_session import TrainingSession

if TYPE_CHECKING:
    from hpcaccel.runtime.handlers import GradientAccumulationPlugin

__all__ = ["GradientState"]


class _OwnLoader:
    """A loader of the script's own among the loaders in use. Checkpoints do not contain its position.

    Args:
        loader: has the attributes ``end_of_dataloader`` and ``remainder``.
    """

    trains = False
    given_at_step = -1
    place = (0, 0)

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    @property
    def at_last_batch(self) -> bool:
        return bool(self.loader.end_of_dataloader)

    @property
    def identity(self) -> int:
        return id(self.loader)


def _loader(source: Any) -> Any:
    """The loader as the script has it."""
    return source.loader if isinstance(source, _OwnLoader) else source


class GradientState:
    """Gradient-accumulation state of the Accelerator that returned this object; by default, of the newest Accelerator.

    Without an Accelerator, every batch ends in an optimizer step. A ``gradient_accumulation_plugin`` changes the
    settings of that Accelerator.
    """

    _shared_state: ClassVar[SharedState] = SharedState()
    _without: ClassVar[Accumulation] = Accumulation(1)

    def __init__(
        self,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        *,
        _accumulation: Accumulation | None = None,
    ) -> None:
        self._own = _accumulation
        plugin = gradient_accumulation_plugin
        if plugin is not None:
            self._accumulation.steps = plugin.num_steps
            self._accumulation.sync_with_dataloader = plugin.sync_with_dataloader
            self._accumulation.sync_each_batch = plugin.sync_each_batch
            self._accumulation.adjust_scheduler = plugin.adjust_scheduler

    @property
    def _accumulation(self) -> Accumulation:
        if self._own is not None:
            return self._own
        session = TrainingSession.existing()
        return GradientState._without if session is None else session.accumulation

    def __getstate__(self) -> dict[str, Any]:
        """A copy shows the newest Accelerator's state, whose accumulation a copy of a prepared optimizer uses, too."""
        return {"_own": None}

    @classmethod
    def _shared_values(cls) -> dict[str, Any]:
        return {} if TrainingSession.existing() is None else {"sync_gradients": cls().sync_gradients}

    @staticmethod
    def _reset_state() -> None:
        """Reset the count of micro-batches."""
        GradientState._without = Accumulation(1)
        session = TrainingSession.existing()
        if session is not None:
            session.accumulation.reset()

    @property
    def initialized(self) -> bool:
        """Whether a training has begun in this process."""
        return TrainingSession.existing() is not None

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends in an optimizer step."""
        return self._accumulation.is_boundary

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._accumulation.is_boundary = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._accumulation.steps

    @property
    def adjust_scheduler(self) -> bool:
        """The value of this Accelerate setting, which has no effect."""
        return TrainingSession.existing() is not None and self._accumulation.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader always ends in an optimizer step."""
        return self._accumulation.sync_with_dataloader

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The settings of gradient accumulation, by the names of ``GradientAccumulationPlugin``."""
        return {
            "num_steps": self.num_steps,
            "adjust_scheduler": self.adjust_scheduler,
            "sync_with_dataloader": self.sync_with_dataloader,
            "sync_each_batch": self._accumulation.sync_each_batch,
        }

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader that returned the latest batch, or the script's own loader that has begun since; None if
        no loader is being iterated."""
        return _loader(self._accumulation.loaders.current)

    @property
    def dataloader_references(self) -> list[Any]:
        """None, followed by all loaders that are being iterated, outermost first."""
        return [None, *map(_loader, self._accumulation.loaders.sources)]

    def _add_dataloader(self, dataloader: Any) -> None:
        """Make a loader that is not prepared the active one: its attribute ``end_of_dataloader`` ends an accumulation.

        Loaders of Accelerate's kind call this when an iteration begins, and ``_remove_dataloader`` at its end.
        """
        self._remove_dataloader(dataloader)
        self._accumulation.loaders.began(_OwnLoader(dataloader))

    def _remove_dataloader(self, dataloader: Any) -> None:
        loaders = self._accumulation.loaders
        for source in loaders.sources:
            if _loader(source) is dataloader:
                loaders.ended(source)

    @property
    def in_dataloader(self) -> bool:
        """Whether the program is in a loop over a prepared loader."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has returned its last batch."""
        return self.in_dataloader and bool(self.active_dataloader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Number of samples, over all ranks, in the last batch of the active loader if that batch is incomplete; 0 if
        it is complete; -1 if it is dropped, if the number is unknown, or if there is no active loader."""
        return int(self.active_dataloader.remainder) if self.in_dataloader else -1

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether the gradients of a step on XLA devices have been averaged over the ranks, and the step is due."""
        module = sys.modules.get("hpcaccel.runtime.distributed.xla_device")
        return module is not None and module.gradients_are_reduced()

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )
