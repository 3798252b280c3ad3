"""The script's own objects in, ready for the group of ranks out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hpcaccel.runtime.accelerator_mixins.session_mixin import Face

if TYPE_CHECKING:
    from hpcaccel.runtime.handlers import DataLoaderConfiguration

__all__ = ["PrepareFace"]


class PrepareFace(Face):
    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Models, optimizers, loaders and schedulers, in any order, ready for this group of ranks; the same order comes
        back, a single object bare. What is none of these passes through, and so does what was prepared before.

        Args:
            device_placement: for each object whether it, or its batches, are moved to this rank's device.

        Raises:
            RuntimeMisuse: ``device_placement`` is of another length; an object was prepared before and what came back
                then is not used; an optimizer has no parameter of a prepared model.
        """
        from hpcaccel.runtime.preparation import prepare

        prepared = prepare(self._begun(), objects, device_placement=device_placement)
        return prepared[0] if len(objects) == 1 else tuple(prepared)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """One model. ``evaluation_mode``: it is not trained, and needs no gradients from other ranks."""
        from hpcaccel.runtime.parallel.model_preparation import prepare_model

        place = self.device_placement if device_placement is None else device_placement
        return prepare_model(self._begun(), model, place=place, evaluation_mode=evaluation_mode)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """One optimizer, after its model. Where its state lies follows from its parameters."""
        return self.prepare(optimizer)

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """One loader.

        Args:
            slice_fn_for_dispatch: ``slice_fn(batch, slice, process_index=r, num_processes=P)`` divides what rank 0 has
                read for all, where batches are no nested tensors.
        """
        prepared = self.prepare(data_loader, device_placement=None if device_placement is None else [device_placement])
        if slice_fn_for_dispatch is not None:
            prepared.slice_fn = slice_fn_for_dispatch
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """One scheduler, after its optimizer."""
        return self.prepare(scheduler)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False
    ) -> nn.Module:
        """The module as the script made it, without DDP and ``torch.compile``; a sharded one keeps its shards, and one
        that was never prepared comes back as it is.

        Args:
            keep_fp32_wrapper: it goes on computing in the precision that was prepared; False: its own forward again.
            keep_torch_compile: put the compiled wrapper around it again.
        """
        from hpcaccel.runtime.parallel import unwrapping

        return unwrapping.unwrap(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """A loader that leaves out the first batches of this rank in every iteration; map-style data is not read."""
        from hpcaccel.runtime.data.skipping import skip_first_batches

        return skip_first_batches(dataloader, num_batches)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a library has spread the model's layers over several devices of this process."""
        from hpcaccel.runtime.parallel.model_preparation import is_dispatched

        return is_dispatched(model)

    def to_device(self, value: Any) -> Any:
        """Nested tensors on this rank's device."""
        from hpcaccel.runtime.distributed.collectives.ops import to_device

        return to_device(value, self._session.group.device)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Train on as many batches as each rank has: those that are through answer for the others' gradients.

        Args:
            joinables: prepared models under DDP.
            even_batches: what prepared loaders do inside; None: as they are.
        """
        from hpcaccel.runtime.training.join import join_uneven_inputs

        return join_uneven_inputs(self._setup, joinables, even_batches=even_batches)

    def free_memory(self, *objects: Any) -> tuple[None, ...]:
        """Forget what was prepared; ``a, b = accelerator.free_memory(a, b)`` forgets the script's names for it too."""
        self._session.forget()
        gc.collect()
        if self._session.group.device.type == "cuda":
            torch.cuda.empty_cache()
        return tuple(None for _ in objects)

    clear = free_memory

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """How loaders that are prepared from now on share out the data; may be set, or changed in place."""
        return self._setup.dataloader_config

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self._setup.dataloader_config = value

    @property
    def device_placement(self) -> bool:
        return self._setup.settings.device_placement

    @property
    def split_batches(self) -> bool:
        return self._setup.settings.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        return self._setup.settings.dispatch_batches

    @property
    def even_batches(self) -> bool:
        return self._setup.settings.even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        return self._setup.settings.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        return self._setup.settings.use_stateful_dataloader

    @property
    def rng_types(self) -> list[str]:
        return list(self._setup.settings.rng_types)

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        return self._setup.settings.step_scheduler_with_optimizer

    @property
    def non_blocking(self) -> bool:
        return self._setup.settings.non_blocking
