"""Snapshots in memory on a real Slurm: a killed rank, and a lost node with and without replicas.

All nodes of the development cluster are on this machine and share /dev/shm, where each has a folder of its own name.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .dev_cluster import Cluster, own_cluster, wait_until
from .injectors import signal_rank, taken_away
from .scenario import Scenario
from .test_faults_slurm import ends_as_undisturbed, nodes_of

pytestmark = pytest.mark.chaos

PAUSE = ("--pause", "0.4")
EVER = 100_000
"""Steps between checkpoints, of which there are none during these tests."""


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    """Three nodes, with a short SlurmdTimeout: after the loss of one, the run continues on the others."""
    with own_cluster("--nodes", "3", "--slurmd-timeout-seconds", "10") as cluster:
        yield cluster


@pytest.fixture
def run(own: Cluster, tmp_path: Path) -> Iterator[Scenario]:
    run = Scenario(own, tmp_path)
    yield run
    own.run("scancel", "--full", "--signal=KILL", run.job_id, check=False)
    run.scancel()
    wait_until(lambda: not own.run("squeue", "--noheader").stdout.strip(), "the nodes are free again")


def resumed(run: Scenario) -> str:
    """The line with which rank 0 of attempt 2 logged its resume."""
    log = run.dir.rank_log(2, 0).read_text()
    return next((line for line in log.splitlines() if "resumed at step" in line or "starting at step" in line), log)


def test_killed_rank_resumes_from_memory(own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory) -> None:
    run.train(*PAUSE, checkpoint={"every_steps": EVER, "snapshot_every_steps": 3})
    run.wait_for_step(8)
    assert signal_rank(run, 1, signal.SIGKILL)
    run.wait_for_ends(1)
    last = run.lines("end")[0]["last_step"]
    ends_as_undisturbed(run, tmp_path_factory)
    assert "from memory, bit-exact" in resumed(run), run.story
    end = run.lines("end")[1]
    assert end["resumed_from"] == "memory", run.story
    assert last - end["resumed_step"] <= 2 * 3, run.story


@pytest.mark.parametrize("replicas", [1, 0])
def test_part_of_a_lost_node_comes_from_its_neighbour(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory, replicas: int
) -> None:
    """Without replicas the training goes back to its last checkpoint; here there is none."""
    run.train(*PAUSE, checkpoint={"every_steps": EVER, "snapshot_every_steps": 3, "snapshot_replicas": replicas})
    run.wait_for_step(8)
    lost = nodes_of(run)[1]
    with taken_away(own, lost):
        run.wait_for_word(f"hpcaccel: {'resumed' if replicas else 'starting'} at step", attempt=2)
        assert lost not in nodes_of(run, 2), run.story
    ends_as_undisturbed(run, tmp_path_factory)
    if replicas:
        assert "from memory, 2 of its parts from other nodes, bit-exact" in resumed(run), run.story


def test_fewer_nodes_resume_from_memory(own: Cluster, run: Scenario) -> None:
    """The parts of the lost node come from its neighbour; each of the ranks that are left reads several parts."""
    older, interval = 40, 4
    run.train(
        "--epochs", "20", "--pause", "0.25", slurm={"nodes": "2-3"}, resilience={"on_node_loss": "shrink"},
        checkpoint={"every_steps": older, "snapshot_every_steps": interval, "snapshot_replicas": 1},
    )  # fmt: skip
    run.wait_for_step(older + interval + 2)
    before = nodes_of(run)
    assert len(before) == 3
    lost = next(node for node in before if node != run.job()["BatchHost"])
    with taken_away(own, lost):
        run.wait_for_word("hpcaccel: resumed at step", attempt=2)
        assert sorted(nodes_of(run, 2)) == sorted({*before} - {lost}), run.story
        assert run.wait_until_over() == 0, run.story
    assert "from memory, state-exact (world_size: 6 at the save, 4 now)" in resumed(run), run.story
    first, second = run.lines("end")
    assert second["resumed_from"] == "memory", run.story
    assert first["checkpoint_step"] == older < second["resumed_step"], run.story
    assert first["last_step"] - second["resumed_step"] <= 2 * interval, run.story
    assert [line["ranks"] for line in run.lines("start")] == [6, 4], run.story
    assert "1 resume from memory" in run.cli("report", run.dir.run_id).stdout
