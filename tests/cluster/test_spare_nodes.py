"""Jobs that continue without a failed node, on a real Slurm: with spare nodes and on fewer nodes, after power cuts of
one node, of two, and of the node of the batch step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .dev_cluster import Cluster, own_cluster, wait_until
from .injectors import taken_away
from .scenario import PROGRAMS, Scenario
from .test_faults_slurm import ends_as_undisturbed, nodes_of

pytestmark = pytest.mark.chaos

PAUSE = ("--pause", "0.5")
BROKEN_AT_FIRST = f"""
import os, runpy
if os.environ["HPCACCEL_ATTEMPT"] == "1" and os.environ["SLURM_NODEID"] == "0":
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
runpy.run_path({str(PROGRAMS / "train.py")!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    with own_cluster("--nodes", "4", "--slurmd-timeout-seconds", "10") as cluster:
        yield cluster


@pytest.fixture
def run(own: Cluster, tmp_path: Path) -> Iterator[Scenario]:
    run = Scenario(own, tmp_path)
    yield run
    own.run("scancel", "--full", "--signal=KILL", run.job_id, check=False)
    run.scancel()
    wait_until(lambda: not own.run("squeue", "--noheader").stdout.strip(), "the nodes are free again")


def train(run: Scenario, *, spare_nodes: int, nodes: int = 2) -> None:
    run.train(*PAUSE, slurm={"nodes": nodes}, checkpoint={"every_steps": 3}, resilience={"spare_nodes": spare_nodes})
    run.wait_for_step(5)


def test_spare_node_replaces_a_lost_one_in_the_same_job(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> None:
    train(run, spare_nodes=1)
    assert len(nodes_of(run)) == 2
    lost = nodes_of(run)[1]
    with taken_away(own, lost):
        run.wait_for_word("hpcaccel: resumed at step", attempt=2)
        assert lost not in nodes_of(run, 2), run.story
    ends_as_undisturbed(run, tmp_path_factory)
    assert run.ends == [("failed", "restart"), ("completed", "end")], run.story
    assert [line["restart_count"] for line in run.lines("start")] == [0, 0]


def test_two_spare_nodes_replace_two_lost_ones(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> None:
    train(run, spare_nodes=2)
    first, second = nodes_of(run)
    with taken_away(own, second):
        run.wait_for_word("hpcaccel: resumed at step", attempt=2)
        run.wait_for_step(run.lines("end")[0]["checkpoint_step"] + 4, attempt=2)
        with taken_away(own, nodes_of(run, 2)[1]):
            run.wait_for_word("hpcaccel: resumed at step", attempt=3)
            assert nodes_of(run, 3)[0] == first, run.story
    ends_as_undisturbed(run, tmp_path_factory)
    assert run.ends == [("failed", "restart")] * 2 + [("completed", "end")], run.story


def test_node_and_a_spare_node_lost_at_once_are_replaced_by_the_other_spare_node(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The ranks may first be started on the failed spare node, until Slurm notices its failure, too."""
    train(run, spare_nodes=2)
    first, second = nodes_of(run)
    spare, other = (node for node in own.nodes if node not in (first, second))
    with taken_away(own, second), taken_away(own, spare):
        assert run.wait_until_over(timeout_seconds=600) == 0, run.story
    ends_as_undisturbed(run, tmp_path_factory)
    assert run.lines("start")[-1]["nodes"] == [first, other], run.story
    assert {decision for _, decision in run.ends[:-1]} == {"restart"}, run.story
    assert {line["restart_count"] for line in run.lines("start")} == {0}, run.story


def test_spare_node_replaces_that_of_rank_0_which_is_not_that_of_the_batch_step(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rank 0 has moved because the node of the batch step is excluded."""
    program = run.folder / "broken.py"
    program.write_text(BROKEN_AT_FIRST)
    run.submit(
        {
            "entrypoint": {"script": str(program), "args": [*PAUSE, "--always"]},
            "runtime": {"deterministic": True},
            "checkpoint": {"every_steps": 3},
            "resilience": {"spare_nodes": 2},
        }
    )
    run.wait_for_step(5, attempt=2)
    batch_host = run.job()["BatchHost"]
    lost, kept = nodes_of(run, 2)
    assert (nodes_of(run)[0], lost) == (batch_host, nodes_of(run)[1]), run.story
    with taken_away(own, lost):
        run.wait_for_word("hpcaccel: resumed at step", attempt=3)
        (spare,) = {*own.nodes} - {batch_host, lost, kept}
        assert nodes_of(run, 3) == [kept, spare], run.story
    ends_as_undisturbed(run, tmp_path_factory)
    assert run.ends == [("failed", "restart")] * 2 + [("completed", "end")], run.story
    assert [line["error_class"] for line in run.lines("end")][:2] == ["gpu_error", "node_failure"], run.story
    assert [line["restart_count"] for line in run.lines("start")] == [0, 0, 0]


@pytest.mark.parametrize("nodes", [2, 1])
def test_loss_of_the_batch_step_requeues_the_job(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory, nodes: int
) -> None:
    """Slurm leaves the job running without its batch step; the step on another node requeues it."""
    train(run, spare_nodes=1, nodes=nodes)
    lost = run.job()["BatchHost"]
    with taken_away(own, lost):
        own.wait_for(run.job_id, ["PENDING"])
        run.wait_for_word("hpcaccel: resumed at step", attempt=2)
        assert lost not in nodes_of(run, 2), run.story
    if nodes == 2:
        ends_as_undisturbed(run, tmp_path_factory)
    else:
        assert run.wait_until_over() == 0, run.story
    assert run.ends[0] == ("lost", "requeue"), run.story
    assert [line["restart_count"] for line in run.lines("start")] == [0, 1]
    assert f"node {lost}, on which the batch step ran, has failed" in run.dir.slurm_log.read_text()


def test_ranks_go_on_with_fewer_nodes_and_get_all_back_by_a_requeue(own: Cluster, run: Scenario) -> None:
    """Other numbers of ranks: the same state and each sample once an epoch, but not the same losses."""
    slow = run.folder / "slow"  # as long as it exists
    slow.touch()
    run.train(
        "--epochs", "20", *PAUSE, "--while-there", str(slow), slurm={"nodes": "2-3"}, checkpoint={"every_steps": 3},
        resilience={"on_node_loss": "shrink"},
    )  # fmt: skip
    run.wait_for_step(5)
    assert len(nodes_of(run)) == 3
    lost = next(node for node in nodes_of(run) if node != run.job()["BatchHost"])
    with taken_away(own, lost):
        run.wait_for_word("hpcaccel: resumed at step", attempt=2)
        assert sorted(nodes_of(run, 2)) == sorted({*nodes_of(run)} - {lost}), run.story
        before = run.lines("end")[0]["checkpoint_step"]
        run.wait_for_step(before + 4, attempt=2)
    run.cli("stop", "--requeue", run.dir.run_id)
    run.wait_for_ends(2)
    slow.unlink()
    assert run.wait_until_over() == 0, run.story
    assert run.ends == [("failed", "restart"), ("stop", "requeue"), ("completed", "end")], run.story
    assert [line["ranks"] for line in run.lines("start")] == [6, 4, 6], run.story
