"""The script's own objects in, ready for the group of ranks out."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hpcaccel.runtime import parallel
from hpcaccel.runtime.preparation import prepare
from hpcaccel.runtime.session import Session

__all__ = ["PrepareFace"]


class PrepareFace:
    _session: Session

    def prepare(self, *objects: Any) -> Any:
        """Models, optimizers, loaders and schedulers, in any order, ready for this group of ranks; the same order comes
        back, a single object bare. What is none of these passes through."""
        settings = self._session.settings
        prepared = prepare(
            self._session,
            objects,
            even_batches=settings.even_batches,
            scheduler_repeats=self._session.group.world_size if settings.step_scheduler_per_process else 1,
        )
        return prepared[0] if len(objects) == 1 else tuple(prepared)

    def prepare_model(self, model: nn.Module) -> Any:
        return self.prepare(model)

    def prepare_optimizer(self, optimizer: Optimizer) -> Any:
        return self.prepare(optimizer)

    def prepare_data_loader(self, loader: DataLoader[Any]) -> Any:
        return self.prepare(loader)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        return self.prepare(scheduler)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The module as the script made it; a sharded one keeps its shards."""
        return parallel.unwrap(model)

    def free_memory(self, *objects: Any) -> tuple[None, ...]:
        """Forget what was prepared; ``a, b = accelerator.free_memory(a, b)`` forgets the script's names for it too."""
        self._session.forget()
        return tuple(None for _ in objects)
