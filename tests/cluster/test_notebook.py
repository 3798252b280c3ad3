"""From a notebook on a login node to a real Slurm: the job's progress in the cell, its result, its curve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernels import started_kernel

from .dev_cluster import Cluster

Lease = Callable[[int], list[str]]

TRAIN = """\
import hpcaccel
def train(steps):
    import os, time
    for step in range(1, steps + 1):
        hpcaccel.log({"loss": 1 / step}, step=step)
        time.sleep(0.2)
    return os.environ["SLURM_JOB_NUM_NODES"], step
"""


def test_function_of_a_cell_is_followed_to_its_result(cluster: Cluster, tmp_path: Path, lease: Lease) -> None:
    pytest.importorskip("matplotlib")
    slurm = {"partition": "gpu", "nodes": 2, "ntasks_per_node": 1, "mem": "1G", "time": 5}
    spec = {"name": "cell", "slurm": {**slurm, "nodelist": ",".join(lease(2))}}
    with started_kernel(tmp_path, **{**cluster.env, "XDG_STATE_HOME": str(tmp_path / "state")}) as kernel:
        assert not kernel.run(TRAIN).error
        submitted = kernel.run(f"run = hpcaccel.submit(train, 20, spec={spec!r}, cluster='slurm')\nrun")
        assert not submitted.error, submitted.traceback
        assert "<b>cell</b>" in submitted.displayed[0]["text/html"]
        followed = kernel.run("run.result(180)")
        assert followed.displayed[-1]["text/plain"] == "('2', 20)", followed.traceback
        assert followed.updates >= 2
        last = followed.displayed[-2]["text/html"]
        for part in ("completed", "step 20", "loss 0.05", "attempt 1 started: 2 ranks"):
            assert part in last
        assert "image/png" in kernel.run("run.plot()").displayed[0]
