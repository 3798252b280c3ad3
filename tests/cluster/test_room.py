"""A full run directory on a real Slurm: no node is to blame, and the run begins when there is room."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from .dev_cluster import Cluster, wait_until
from .scenario import Scenario

Lease = Callable[[int], list[str]]


def test_a_full_run_directory_is_no_nodes_fault(
    cluster: Cluster, lease: Lease, tmp_path: Path, mounted: Callable[[str], Path]
) -> None:
    place = mounted("size=8m")
    run = Scenario(cluster, tmp_path, nodes=lease(1))
    run.plain("--once", resilience={"preflight": "quick"}, grid=("--runs-dir", str(place)))
    log = run.dir.supervisor_log(1)
    wait_until(lambda: log.exists() and "Waiting for 10 minutes" in log.read_text(), "it waits for room")
    assert "it needs 16,777,216 bytes, " in log.read_text()
    subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
    assert run.wait_until_over() == 0, run.story
    assert run.ends == [("completed", "end")], run.story
    assert not run.dir.excluded_nodes.exists()
