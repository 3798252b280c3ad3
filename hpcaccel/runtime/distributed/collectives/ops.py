"""What ranks do together with tensors and objects, with the group given. ``functions`` has the same for the group that
there is, under the names of ``accelerate.utils``."""

from __future__ import annotations

from hpcaccel.runtime.data.placement import to_device
from hpcaccel.runtime.distributed.collectives.gather_for_metrics import gather_samples
from hpcaccel.runtime.distributed.collectives.gathering import broadcast, gather, reduce
from hpcaccel.runtime.distributed.collectives.objects import broadcast_object_list, gather_object
from hpcaccel.runtime.distributed.collectives.padding import pad_across_processes

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "gather_samples",
    "pad_across_processes",
    "reduce",
    "to_device",
]
