"""Methods that prepare models, optimizers, loaders and schedulers for the group of ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hpcaccel.runtime.accelerator_mixins import SessionMixin

if TYPE_CHECKING:
    from hpcaccel.runtime.handlers import DataLoaderConfiguration

__all__ = ["PrepareMixin"]


class PrepareMixin(SessionMixin):
    def prepare(
        self,
        *objects: Any,
        device_placement: Sequence[bool] | None = None,
        device_map: Any = None,
        offload_folder: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Prepare models, optimizers, loaders and schedulers for this group of ranks. Objects of other types, and
        objects that are already prepared, are returned unchanged.

        Args:
            objects: the objects to prepare, in any order.
            device_placement: for each object, whether it (for a loader: its batches) is moved to this rank's device.
            device_map: for models that are larger than a device: the device, ``"cpu"`` or ``"disk"`` of each module, or
                ``"auto"``. A model with parts in CPU memory or on disk can only be evaluated, and is not part of
                checkpoints.
            offload_folder: folder for the parts on disk. If there are several ranks, each uses the folder ``rank_N``
                inside it, unless only the folder itself has an index of weights.

        Returns:
            A tuple of the prepared objects in the same order; for a single object, the prepared object itself.

        Raises:
            RuntimeMisuse: ``device_placement`` and ``objects`` differ in length; an object was prepared before, and the
                script passes the original; an optimizer has no parameter of a prepared model; a model or loader cannot
                be prepared (such as an FSDP1 model, or data that is already sharded); models differ among the ranks.
        """
        from hpcaccel.runtime.preparation import prepare

        setup = self._begun()
        if device_map is not None:
            from hpcaccel.runtime.preparation import dispatch_models

            dispatch_models(setup, objects, device_map, offload_folder=offload_folder)
        prepared = prepare(setup, objects, device_placement=device_placement)
        return prepared[0] if len(objects) == 1 else tuple(prepared)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        device_map: Any = None,
        offload_folder: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Prepare one model.

        Args:
            device_placement: whether the model is moved to this rank's device; default: the Accelerator's setting.
            evaluation_mode: whether the model is only evaluated; it is then neither wrapped in DDP nor sharded.
            device_map, offload_folder: as in ``prepare``.

        Raises:
            RuntimeMisuse: as in ``prepare``.
        """
        from hpcaccel.runtime.model_preparation import dispatch, prepare_model

        setup = self._begun()
        if device_map is not None:
            dispatch(setup, model, device_map, offload_folder=offload_folder)
        place = self.device_placement if device_placement is None else device_placement
        return prepare_model(setup, model, place=place, evaluation_mode=evaluation_mode)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """A prepared loader whose batches DeepSpeed deals out along the sequence (``sp_size`` above 1); without
        sequence parallelism, ``dl`` itself. ``prepare`` does this for loaders that it gets together with the model.

        Args:
            dl: a loader that was prepared before the model.
            model: the prepared model.

        Raises:
            RuntimeMisuse: the model has not been prepared, or DeepSpeed is too old.
        """
        from hpcaccel.runtime.parallelism_config import sequence_size

        session = self._session
        if sequence_size(session.handlers.parallelism) == 1:
            return dl
        from hpcaccel.runtime.deepspeed.sequence_parallel import adapt_loader

        return adapt_loader(dl, getattr(model, "device", session.group.device))

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare one optimizer; prepare its model first. ``device_placement`` is only an attribute of the prepared
        optimizer: its state is on the device of its parameters.

        Raises:
            RuntimeMisuse: as in ``prepare``.
        """
        return self.prepare(optimizer, device_placement=None if device_placement is None else [device_placement])

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare one loader.

        Args:
            device_placement: whether batches are moved to this rank's device; default: the Accelerator's setting.
            slice_fn_for_dispatch: needed if rank 0 reads for all ranks, and batches are not nested tensors.
                ``slice_fn(batch, slice, process_index=r, num_processes=P)`` returns rank r's part of a batch.

        Raises:
            RuntimeMisuse: as in ``prepare``.
        """
        prepared = self.prepare(data_loader, device_placement=None if device_placement is None else [device_placement])
        if slice_fn_for_dispatch is not None:
            prepared.slice_fn = slice_fn_for_dispatch
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare one of torch's schedulers; prepare its optimizer first. Other objects are returned unchanged.

        Raises:
            RuntimeMisuse: the scheduler was prepared before, and the script passes the original.
        """
        return self.prepare(scheduler)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False
    ) -> nn.Module:
        """The model without DDP and ``torch.compile``. A sharded model stays sharded; a model without wrappers is
        returned unchanged.

        Args:
            keep_fp32_wrapper: whether to keep the ``forward`` that runs in the prepared precision. If False, the
                model's own ``forward`` is restored.
            keep_torch_compile: whether to keep the wrapper of ``torch.compile``.
        """
        from hpcaccel.runtime.parallel import ddp

        return ddp.unwrap(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """A loader that skips this rank's first ``num_batches`` batches in every iteration. For map-style data the
        skipped samples are not read, except to fill up the last batches of a prepared loader.

        Raises:
            RuntimeMisuse: ``num_batches`` is negative, or ``dataloader`` is not a DataLoader.
        """
        from hpcaccel.runtime.data.batch_samplers import skip_first_batches

        return skip_first_batches(dataloader, num_batches)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether a library has distributed the model's layers over several devices of this process."""
        from hpcaccel.runtime.model_preparation import is_dispatched

        return is_dispatched(model)

    def to_device(self, value: Any) -> Any:
        """Move the tensors in lists, tuples and dicts of any depth to this rank's device, and return the result."""
        from hpcaccel.runtime.distributed.collectives.nested_ops import to_device

        return to_device(value, self._session.group.device)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Context in which ranks may have unequal numbers of batches: ranks that run out of batches keep taking part in
        gradient all-reduces (torch ``Join``).

        Args:
            joinables: prepared models under DDP.
            even_batches: setting of prepared loaders inside the context; None leaves it unchanged. Ranks are joined
                only if the setting is False.

        Raises:
            RuntimeMisuse: there are several ranks, and one of ``joinables`` is not wrapped in DDP. If the training is
                sharded and the Accelerator's ``even_batches`` is True, a warning is shown instead.

        Example::

            with accelerator.join_uneven_inputs([model], even_batches=False):
                for inputs, targets in loader:
                    accelerator.backward(loss_function(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
        """
        from hpcaccel.runtime.training.gradient_sync import join_uneven_inputs

        return join_uneven_inputs(self._setup, joinables, even_batches=even_batches)

    def free_memory(self, *objects: Any) -> tuple[None, ...]:
        """Drop hpcaccel's references to all prepared objects, and free memory.

        Args:
            objects: variables of the script that refer to prepared objects.

        Returns:
            A None for each of ``objects``: ``model, loader = accelerator.free_memory(model, loader)`` drops the
            script's references, too.
        """
        self._session.forget()
        gc.collect()
        if self._session.group.device.type != "cpu":
            from hpcaccel.runtime.distributed import device_backend

            device_backend.empty_cache()
        return tuple(None for _ in objects)

    clear = free_memory

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """Configuration of loaders that are prepared from now on. Scripts may replace it, or change it in place."""
        return self._setup.dataloader_config

    @dataloader_config.setter
    def dataloader_config(self, value: DataLoaderConfiguration) -> None:
        self._setup.dataloader_config = value

    @property
    def device_placement(self) -> bool:
        """Whether :meth:`prepare` moves models, and prepared loaders move batches, to the device."""
        return self._setup.settings.device_placement

    @property
    def split_batches(self) -> bool:
        """Whether a loader's ``batch_size`` is that of all ranks together, not of each rank."""
        return self._setup.settings.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads all batches and sends each rank its part; None: only for some iterable datasets."""
        return self._setup.settings.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last batches are filled up with samples from the start, so that all ranks have equally many."""
        return self._setup.settings.even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order of epoch e is drawn with the seed ``data_seed + e``."""
        return self._setup.settings.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether iterable datasets are read with torchdata's StatefulDataLoader."""
        return self._setup.settings.use_stateful_dataloader

    @property
    def rng_types(self) -> list[str]:
        """Random generators that are set to rank 0's state at the start of each epoch of a prepared loader."""
        return list(self._setup.settings.rng_types)

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether prepared schedulers step only when the optimizer has stepped."""
        return self._setup.settings.step_scheduler_with_optimizer

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        return self._setup.settings.non_blocking
