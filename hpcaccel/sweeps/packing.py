"""What a trial is given of a worker's allocation, where several run side by side (``sweep.pack``).

The ``slurm`` section of a sweep is a worker's. A trial's own spec asks for its share of that, so that its ranks are as
many as its GPUs, and the best trial's spec, submitted alone, trains with as many ranks as it did in the sweep.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec

__all__ = ["share"]

_COUNTED = re.compile(r"(?<![\w.])\d+(?=,|$)")
_GPUS = re.compile(r"(?<![\w])(gpu(?::[^:,]+)?:)(\d+)")


def share(job: JobSpec, pack: int) -> JobSpec:
    """The spec of one of ``pack`` trials in an allocation such as ``job`` asks for. Of what cannot be divided by them,
    each gets the smaller part, and one at least."""
    if pack == 1:
        return job
    slurm = job.slurm
    update: dict[str, Any] = {}
    if slurm.ntasks_per_node is not None:
        update["ntasks_per_node"] = max(1, slurm.ntasks_per_node // pack)
    if slurm.gpus_per_node is not None:
        update["gpus_per_node"] = _COUNTED.sub(lambda found: _part(found[0], pack), slurm.gpus_per_node)
    if slurm.gpus_per_task is not None and (slurm.ntasks_per_node or 1) < pack:
        update["gpus_per_task"] = _COUNTED.sub(lambda found: _part(found[0], pack), slurm.gpus_per_task)
    if slurm.gres is not None:
        update["gres"] = _GPUS.sub(lambda found: found[1] + _part(found[2], pack), slurm.gres)
    if slurm.mem_megabytes:
        update["mem"] = f"{max(1, slurm.mem_megabytes // pack)}M"
    if slurm.cpus_per_task is not None:
        # As many for each rank as before, where the ranks are fewer; else a part of them.
        fewer = slurm.ranks_per_node // slurm.model_copy(update=update).ranks_per_node
        update["cpus_per_task"] = max(1, slurm.cpus_per_task * fewer // pack)
    return job.model_copy(update={"slurm": slurm.model_copy(update=update)})


def _part(count: str, pack: int) -> str:
    return str(max(1, int(count) // pack))
