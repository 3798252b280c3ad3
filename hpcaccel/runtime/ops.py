"""What ranks do together with tensors and objects, with the group given. ``together`` has the same for the group that
there is, under the names of ``accelerate.utils``."""

from __future__ import annotations

from typing import Any

import torch

from hpcaccel.runtime.gathering import broadcast, gather, reduce
from hpcaccel.runtime.objects import broadcast_object_list, gather_object
from hpcaccel.runtime.precision import map_tensors

__all__ = ["broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "to_device"]


def to_device(value: Any, device: torch.device) -> Any:
    """Nested tensors on ``device``."""
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))
