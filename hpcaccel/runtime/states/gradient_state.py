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
        return {
            "num_steps": self.num_steps,
            "adjust_scheduler": self.adjust_scheduler,
            "sync_with_dataloader": self.sync_with_dataloader,
            "sync_each_batch": self._accumulation.sync_each_batch,
        }

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader that returned the latest batch, while it is being iterated; else None."""
        return self._accumulation.loaders.current

    @property
    def dataloader_references(self) -> list[Any]:
        """None, followed by all prepared loaders that are being iterated, outermost first."""
        return [None, *self._accumulation.loaders.sources]

    @property
    def in_dataloader(self) -> bool:
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has returned its last batch."""
        return self.in_dataloader and bool(self.active_dataloader.at_last_batch)

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
