"""Warning about an optimizer whose model was not prepared: each rank would train a model of its own."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpcaccel.runtime.distributed.collectives.call_site import call_site
from hpcaccel.runtime.distributed.device_mesh import is_dtensor
from hpcaccel.runtime.rank_logger import TRAINING_LOG

__all__ = ["warn_if_unprepared"]

logger = logging.getLogger(TRAINING_LOG)

_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}
"""torch's classes, with which a script may have wrapped its model itself. They reduce gradients over the ranks."""


def warn_if_unprepared(optimizer: Optimizer, models: Iterable[nn.Module], *, ranks: int) -> None:
    """Warn if nothing is known to reduce the gradients of any of the optimizer's parameters over the ranks.

    Args:
        models: the prepared models.
        ranks: number of ranks.
    """
    own = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    if not own or any(map(is_dtensor, own)) or _has_any(models, own) or _has_any(_wrapped_by_script(), own):
        return
    logger.warning(
        "%s: no parameter of this %s belongs to a prepared model, so hpcaccel does not average the gradients over the "
        "%d ranks. Unless the script does so itself, each rank trains a different model. Pass the model to prepare(), "
        "before the optimizer or in the same call",
        call_site(),
        type(optimizer).__name__,
        ranks,
    )


def _has_any(models: Iterable[nn.Module], parameters: Sequence[torch.Tensor]) -> bool:
    wanted = set(map(id, parameters))
    return any(id(one) in wanted for model in models for one in model.parameters())


def _wrapped_by_script() -> Iterator[Any]:
    """torch keeps no list of its wrappers, so all objects of the process are searched."""
    for one in gc.get_objects():
        # The type is compared, not ``isinstance``: that reads ``__class__``, which may run code of the object's own.
        if any(kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch.") for kind in type(one).__mro__):
            yield one
