"""Activation checkpointing: what a block computed is thrown away after the forward pass and computed again in the
backward pass, which costs a third more time and saves most of the memory that activations take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.parallel.forwards import Around, put_around, take_off

__all__ = ["Recomputed", "recompute"]


class Recomputed(Around):
    """A forward whose activations are computed again when the gradients need them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Make these blocks recompute their activations. Parameters keep their names.

    Raises:
        RuntimeMisuse: there are none.
    """
    found = list(blocks)
    if not found:
        raise RuntimeMisuse(
            "activation checkpointing found no repeated blocks in the model. Name their classes in fsdp.wrap, or call "
            "torch.utils.checkpoint in the model itself"
        )
    for block in found:
        take_off(block, Recomputed)
        put_around(block, Recomputed)
