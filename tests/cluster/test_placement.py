"""Placement of jobs on a real Slurm: reservation, switches and excluded nodes."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hpcaccel.slurm import hostlist

from .dev_cluster import Cluster
from .scenario import Scenario

pytestmark = pytest.mark.chaos

Lease = Callable[[int], list[str]]


def test_reservation_switches_and_excluded_nodes_reach_slurm(cluster: Cluster, lease: Lease, tmp_path: Path) -> None:
    run = Scenario(cluster, tmp_path, nodes=lease(1))
    others = [node for node in cluster.nodes if node not in run.nodes]
    profiles = tmp_path / "config" / "hpcaccel" / "clusters"
    profiles.mkdir(parents=True)
    (profiles / "here.yaml").write_text(yaml.safe_dump({"exclude": [others[0]]}))
    run.env["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    name = f"course{os.getpid()}"
    made = [f"ReservationName={name}", f"Users={getpass.getuser()}", "StartTime=now", "Duration=20"]
    cluster.run("scontrol", "create", "reservation", *made, f"Nodes={run.nodes[0]}")
    try:
        slurm = {"reservation": name, "switches": "1@3:00", "exclude": others[1]}
        run.plain("--until", "1", slurm=slurm, grid=("--cluster", "here"))
        job = cluster.job(run.job_id)
        assert job["Reservation"] == name
        assert job["Switches"] == "1@00:03:00"
        assert set(hostlist.expand(job["ExcNodeList"])) == set(others[:2])
        assert run.wait_until_over() == 0, run.story
    finally:
        cluster.run("scancel", run.job_id, check=False)
        cluster.run("scontrol", "delete", f"ReservationName={name}")
