"""Ranks with unequal numbers of batches: those that are through answer for the others' gradients until all are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms.join import Join, Joinable
from torch.utils.data import IterableDataset

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.distributed.process_info import distributed_type
from hpcaccel.runtime.enums import DistributedType
from hpcaccel.runtime.parallel import compiling

if TYPE_CHECKING:
    from hpcaccel.runtime.accelerator_setup import Setup

__all__ = ["join_uneven_inputs"]


@contextmanager
def join_uneven_inputs(setup: Setup, joinables: Sequence[Any], *, even_batches: bool | None) -> Iterator[None]:
    """With DDP's own Join, on gloo as well as on NCCL. When all are through, they have the parameters of the rank that
    was through last. Saves and stops wait until then.

    Raises:
        RuntimeMisuse: something that cannot be joined, such as a sharded model.
    """
    session = setup.session
    kind = distributed_type(session.world, session)
    even = setup.settings.even_batches if even_batches is None else even_batches
    if (
        kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
        and setup.settings.even_batches
    ):
        warnings.warn(
            "joining is only supported for multi-GPU and multi-CPU training in DistributedDataParallel, and this is "
            f"{kind}: join_uneven_inputs() has no effect, and batches stay even",
            stacklevel=4,
        )
        yield
        return
    if session.group.world_size == 1:
        yield
        return
    items: list[Any] = [compiling.strip(item)[0] for item in joinables]
    for item in items:
        if not isinstance(item, Joinable):
            raise RuntimeMisuse(
                f"join_uneven_inputs({type(item).__name__}): only models in DistributedDataParallel can go on without "
                "a rank. A sharded model needs all ranks in every step: leave even_batches on"
            )
    loaders: list[Any] = [] if even_batches is None else list(session.prepared.loaders)
    changed = [(loader, loader.even_batches) for loader in loaders]
    if even_batches is not None and any(isinstance(loader.dataset, IterableDataset) for loader in loaders):
        warnings.warn(
            f"join_uneven_inputs(even_batches={even_batches}): in Accelerate this is only supported for map-style "
            "datasets. Here the loaders of iterable datasets that were prepared follow it, too",
            stacklevel=4,
        )
    for loader, _ in changed:
        loader.even_batches = even
    accumulation = setup.accumulation
    each = accumulation.sync_each_batch
    # Ranks end at different micro-batches, so they would disagree on which of them share their gradients.
    accumulation.sync_each_batch = each or not even
    try:
        # A rank that is through makes no more steps: the others must not wait for what it says at the end of each.
        with session.loop.ticks_held(), Join(items, enable=not even, throw_on_early_termination=False):
            yield
    finally:
        accumulation.sync_each_batch = each
        for loader, before in changed:
            loader.even_batches = before
