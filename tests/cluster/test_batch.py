"""A killed supervisor on a real Slurm: the batch step starts another one in the same job."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.process_identity import process_start

from .dev_cluster import Cluster
from .scenario import Scenario

Lease = Callable[[int], list[str]]


@pytest.mark.chaos  # on this machine: tests/node/test_batch.py
def test_killed_supervisor_is_restarted_in_the_same_job(cluster: Cluster, lease: Lease, tmp_path: Path) -> None:
    run = Scenario(cluster, tmp_path, nodes=lease(2))
    run.plain("--wait", "--until", "1", runtime={"stop": "signals"}, slurm={"nodes": 2})
    ranks = [int(run.wait_for_word("starting", rank=rank).split()[1]) for rank in (0, 1)]
    os.kill((read_json(run.dir.lease) or {})["pid"], signal.SIGKILL)
    assert run.wait_until_over() == 0, run.story
    assert run.ends == [("lost", "restart"), ("completed", "end")], run.story
    assert all(process_start(rank) is None for rank in ranks)
    assert {line["job_id"] for line in run.lines("start")} == {run.job_id}
    assert cluster.wait_for(run.job_id, ["COMPLETED"])["Restarts"] == "0"
    assert "signal 9; restarted in the same job" in run.lines("end")[0]["detail"]
