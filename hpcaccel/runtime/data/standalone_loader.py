"""``prepare_data_loader``: a prepared loader without an Accelerator, with settings given one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.data.loader import PreparedLoader, is_dispatched, make_loader
from hpcaccel.runtime.data.sampling import sampler_of
from hpcaccel.runtime.distributed.process_group import Group
from hpcaccel.runtime.distributed.world import World
from hpcaccel.runtime.training.accumulation import LoadersInUse
from hpcaccel.runtime.training_session import Session

__all__ = ["bring_to_main", "get_sampler", "prepare_data_loader"]


class _NoLoop:
    """For loaders of a process without an Accelerator: nothing is saved or stopped."""

    finishing = False
    finished_epochs_are_over = False
    step = 0

    def step_is_over(self) -> None:
        """Nobody asks."""

    def restore_rng(self) -> None:
        """Nothing was loaded."""

    def loop_is_entered(self) -> None:
        """Nobody waits."""

    def loop_is_left(self) -> None:
        """Nobody waits."""


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
    """This rank's part of a loader, as ``Accelerator.prepare`` gives it. It is in no checkpoint: a loader that is to go
    on in the middle of an epoch belongs into ``Accelerator.prepare``.

    Args:
        num_processes, process_index: default: this process's place.
        torch_device_mesh: of no effect: the Accelerator knows which ranks see the same data.

    Raises:
        RuntimeMisuse: another number of processes than there are, with ``dispatch_batches``; as ``prepare``.
    """
    session = Session.existing()
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


def _placed(group: Group, device: torch.device | None, size: int | None, rank: int | None, *, dispatch: bool) -> Group:
    """The group, or what it would be for another rank of another number of them."""
    device = group.device if device is None else torch.device(device)
    size = group.data_size if size is None else size
    rank = group.data_rank if rank is None else rank
    if (size, rank) == (group.data_size, group.data_rank):
        return replace(group, device=device)
    if dispatch and size > 1:
        raise RuntimeMisuse(
            f"prepare_data_loader(num_processes={size}, process_index={rank}): with dispatch_batches, which is the "
            "default for iterable datasets that are put on the device, rank 0 can send batches to the ranks that there "
            f"are only, and this is rank {group.data_rank} of {group.data_size}. Pass dispatch_batches=False"
        )
    place = replace(group.env, rank=rank, world_size=size)
    return Group(place, device, None, default=group.default, timeout=group.timeout)


def bring_to_main(loader: DataLoader[Any], group: Group, *, seedable: bool, data_seed: int | None) -> int:
    """Rank 0's states for the generators of the sampler and the dataset; the seed of the order comes back."""
    # Every rank draws, so that their generators stay together, and rank 0's number counts.
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    if seedable:
        seed = torch.initial_seed()
    for owner in (sampler_of(loader), loader.dataset):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.set_state(group.from_main(generator.get_state()))
    return int(group.from_main(seed if data_seed is None else data_seed))


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """What decides over single samples inside of the loader's batch sampler; None where there is none."""
    batches = dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler
    return getattr(batches, "sampler", None)
