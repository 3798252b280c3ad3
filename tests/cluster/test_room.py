"""A full run directory on a real Slurm: no node is blamed, and the run starts once there is space."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import Cluster, program, wait_until
from .scenario import Scenario


@pytest.fixture
def place(mounted: Callable[[str], Path]) -> Path:
    return mounted("size=8m")


@pytest.fixture
def cluster(place: Path, new_root: Path) -> Cluster:
    """Started after ``place`` is mounted: nodes with mounts of their own (a Slurm in /opt) do not see later ones."""
    program("up", "--root", str(new_root), "--nodes", "1")
    return Cluster.at(new_root)


def test_full_run_directory_blames_no_node_and_the_run_waits_for_space(
    cluster: Cluster, place: Path, tmp_path: Path
) -> None:
    run = Scenario(cluster, tmp_path)
    run.plain("--once", resilience={"preflight": "quick"}, grid=("--runs-dir", str(place)))
    log = run.dir.supervisor_log(1)
    wait_until(lambda: log.exists() and "Waiting for up to 10 minutes" in log.read_text(), "it waits for room")
    assert "the run needs 16,777,216 bytes there, " in log.read_text()
    subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
    assert run.wait_until_over() == 0, run.story
    assert run.ends == [("completed", "end")], run.story
    assert not run.dir.excluded_nodes.exists()
