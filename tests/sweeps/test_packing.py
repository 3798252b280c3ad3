"""The share of an allocation for each of several packed trials."""

from __future__ import annotations

from typing import Any

import pytest

from hpcaccel.spec import spec_from_values
from hpcaccel.sweeps.definition import share


@pytest.mark.parametrize(
    ("pack", "whole", "part", "ranks"),
    [
        (1, {"gpus_per_node": 4, "mem": "8G"}, {"gpus_per_node": "4", "mem": "8G"}, 4),
        (2, {"gpus_per_node": 4, "cpus_per_task": 3}, {"gpus_per_node": "2", "cpus_per_task": 3}, 2),
        (4, {"gpus_per_node": "a100:4", "mem": "8G"}, {"gpus_per_node": "a100:1", "mem": "2048M"}, 1),
        (4, {"gpus_per_node": 1, "cpus_per_task": 8}, {"gpus_per_node": "1", "cpus_per_task": 2}, 1),
        (2, {"gpus_per_node": 2, "ntasks_per_node": 1}, {"gpus_per_node": "1", "ntasks_per_node": 1}, 1),
        (2, {"gpus_per_task": 1, "ntasks_per_node": 4}, {"gpus_per_task": "1", "ntasks_per_node": 2}, 2),
        (2, {"gpus_per_task": 2}, {"gpus_per_task": "1"}, 1),
        (2, {"gres": "gpu:a100:4"}, {"gres": "gpu:a100:2"}, 2),
        (2, {"ntasks_per_node": 8, "cpus_per_task": 2}, {"ntasks_per_node": 4, "cpus_per_task": 2}, 4),
    ],
)
def test_packed_trial_requests_its_share_of_the_allocation(
    pack: int, whole: dict[str, Any], part: dict[str, Any], ranks: int
) -> None:
    values = {"name": "tune", "entrypoint": {"command": ["true"]}, "slurm": {"time": 60, **whole}}
    job = share(spec_from_values(values), pack)
    assert {name: getattr(job.slurm, name) for name in part} == part
    assert job.ranks_per_node == ranks
    spec_from_values(job.model_dump(mode="json", exclude_unset=True))  # the share is a valid job spec
