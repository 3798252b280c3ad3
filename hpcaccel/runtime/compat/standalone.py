"""Functions that work without an Accelerator's methods: prepare a loader, save and load, unwrap or compile a model,
compute under autocast, move a state."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.checkpointing import export_model
from hpcaccel.runtime.data.loader import PreparedLoader, is_dispatched, make_loader
from hpcaccel.runtime.data.loaders_in_use import LoadersInUse
from hpcaccel.runtime.data.sampling import bring_to_main
from hpcaccel.runtime.distributed.collectives.nested_tensors import recursively_apply
from hpcaccel.runtime.distributed.process_group import RankGroup
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.handlers import AutocastKwargs
from hpcaccel.runtime.parallel.compiling import compile_blocks, compile_whole
from hpcaccel.runtime.parallel.ddp import unwrap
from hpcaccel.runtime.parallel.precision import autocast
from hpcaccel.runtime.settings import Settings
from hpcaccel.runtime.states.accelerator_state import AcceleratorState
from hpcaccel.runtime.training_session import TrainingSession

__all__ = [
    "ThreadLocalSharedDict",
    "compile_regions",
    "do_nothing",
    "extract_model_from_parallel",
    "get_mixed_precision_context_manager",
    "get_sampler",
    "load",
    "move_to_device",
    "patch_optimizer_step",
    "prepare_data_loader",
    "save",
]


class _NoLoop:
    """Loop hooks for loaders in a process without an Accelerator: nothing is saved or stopped."""

    finishing = False
    finished_epochs_are_over = False
    step = 0

    def step_is_over(self) -> None:
        """Do nothing."""

    def restore_rng(self) -> None:
        """Do nothing: no state was loaded."""

    def loop_is_entered(self) -> None:
        """Do nothing."""

    def loop_is_left(self) -> None:
        """Do nothing."""


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> PreparedLoader:
    """This rank's part of a loader, as ``Accelerator.prepare`` returns it. Checkpoints do not contain this loader's
    position. To resume in the middle of an epoch, use ``Accelerator.prepare``.

    Args:
        num_processes, process_index: by default, the number of data-parallel ranks and this process's rank among them.
        torch_device_mesh: ignored; the Accelerator has the mesh.

    Raises:
        RuntimeMisuse: the data is already sharded; or, with ``dispatch_batches``, ``num_processes`` or
            ``process_index`` differs from the default.
    """
    session = TrainingSession.existing()
    group = World.current().group if session is None else session.group
    dispatch = is_dispatched(dataloader, dispatch_batches=dispatch_batches, put_on_device=put_on_device)
    group = _placed(group, device, num_processes, process_index, dispatch=dispatch)
    return make_loader(
        dataloader,
        group=group,
        in_use=LoadersInUse() if session is None else session.in_use,
        hooks=_NoLoop() if session is None else session.loop,
        seed=bring_to_main(dataloader, group, seedable=use_seedable_sampler, data_seed=data_seed),
        even_batches=even_batches,
        split_batches=split_batches,
        dispatch_batches=dispatch,
        put_on_device=put_on_device,
        rng_types=tuple(str(kind) for kind in rng_types or ()),
        slice_fn=slice_fn_for_dispatch,
        seedable=use_seedable_sampler,
        non_blocking=non_blocking,
        stateful=use_stateful_dataloader,
    )


def _placed(
    group: RankGroup, device: torch.device | None, size: int | None, rank: int | None, *, dispatch: bool
) -> RankGroup:
    """``group`` with the device, the number of ranks and the rank that the caller has set, if any."""
    device = group.device if device is None else torch.device(device)
    size = group.data_size if size is None else size
    rank = group.data_rank if rank is None else rank
    if (size, rank) == (group.data_size, group.data_rank):
        return replace(group, device=device)
    if dispatch and size > 1:
        raise RuntimeMisuse(
            f"prepare_data_loader(num_processes={size}, process_index={rank}): this process is rank "
            f"{group.data_rank} of {group.data_size}, and with dispatch_batches (the default for iterable datasets "
            "with put_on_device=True) no other values are possible, because rank 0 sends the batches to the ranks of "
            "the process group. Pass dispatch_batches=False"
        )
    place = replace(group.env, rank=rank, world_size=size)
    return RankGroup(place, device, None, default=group.default, timeout=group.timeout)


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """The sampler of single samples inside the loader's batch sampler; None without a batch sampler."""
    batches = dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler
    return getattr(batches, "sampler", None)


def save(
    obj: Any, f: str | os.PathLike[str] | Any, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write ``obj`` to ``f`` on the main process, or with ``save_on_each_node`` on the first process of each node. If
    ``obj`` contains a model's shards, all ranks must call this function.

    Args:
        f: a path or a file object.
        safe_serialization: write a safetensors file; ``obj`` must then be a dict of tensors by name, and ``f`` a path.

    Raises:
        RuntimeMisuse: ``obj`` contains shards, and some ranks did not call this function; ``obj`` is a sharded module;
            or safetensors cannot store ``obj``.
    """
    group = World.current().group
    export_model.save(obj, f, group, settings_in_use(), safe=safe_serialization, on_each_node=save_on_each_node)


def settings_in_use() -> Settings:
    """The training's settings, which include how long ranks wait for each other; the defaults without a training."""
    session = TrainingSession.existing()
    return Settings() if session is None else session.settings


def load(f: str | os.PathLike[str] | Any, map_location: Any = None, **kwargs: Any) -> Any:
    """``torch.load`` with ``weights_only=True``, which reads tensors and plain containers. Pass ``weights_only=False``
    to read any objects, from trusted files only."""
    kwargs.setdefault("weights_only", True)
    return torch.load(f, map_location=map_location, **kwargs)


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False, recursive: bool = False
) -> nn.Module:
    """The model without wrappers: see ``Accelerator.unwrap_model``."""
    return unwrap(
        model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile, recursive=recursive
    )


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile repeated blocks in place and individually, so that one compilation serves them all. A model without
    repeated blocks is compiled as a whole."""
    if compile_blocks(module, compile_kwargs):
        return module
    return compile_whole(module, compile_kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """``torch.autocast`` for the Accelerator's device and precision; a context without effect unless ``native_amp`` is
    set.

    Raises:
        RuntimeMisuse: there is no Accelerator yet.
    """
    state = AcceleratorState()
    return autocast(state.device, state.mixed_precision, autocast_kwargs) if native_amp else nullcontext()


def move_to_device(state: Any, device: Any) -> Any:
    """``state`` with its tensors, in lists, tuples and dicts of any depth, on ``device``; other values are kept."""
    return recursively_apply(lambda tensor: tensor.to(device), state)


def patch_optimizer_step(accelerated_optimizer: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``method`` so that it also sets ``accelerated_optimizer._accelerate_step_called``. A script that resets this
    attribute before it calls a gradient scaler can then test whether the scaler has called ``method``. Prepared
    optimizers detect skipped steps themselves: see ``step_was_skipped``."""

    @wraps(method)
    def marking_step(*args: Any, **kwargs: Any) -> Any:
        accelerated_optimizer._accelerate_step_called = True
        return method(*args, **kwargs)

    return marking_step


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accepts any arguments."""


class ThreadLocalSharedDict(threading.local):
    """Descriptor for a class attribute: a dict that the class and its instances share, one for each thread. Assigning
    to the attribute of an instance replaces this thread's dict. ``thread_local`` has no effect."""

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[Any, Any] = {}

    def __get__(self, instance: Any, owner: type | None = None) -> dict[Any, Any]:
        return self._storage

    def __set__(self, instance: Any, value: dict[Any, Any]) -> None:
        self._storage = value
