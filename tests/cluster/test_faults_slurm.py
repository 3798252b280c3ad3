"""Faults of the cluster, on a cluster of this file's own: daemons die, nodes fail, limits change during a run."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from .dev_cluster import Cluster, own_cluster, wait_until
from .injectors import drained, hold_in_queue, release, signal_rank, taken_away
from .scenario import Scenario
from .undisturbed import undisturbed

pytestmark = pytest.mark.chaos

PAUSE = ("--pause", "0.25")
SHORT_GRACE_SECONDS = 2


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    """Four nodes, with a short SlurmdTimeout and a short grace time."""
    options = ["--nodes", "4", "--slurmd-timeout-seconds", "10", "--grace-seconds", str(SHORT_GRACE_SECONDS)]
    with own_cluster(*options) as cluster:
        yield cluster


@pytest.fixture
def run(own: Cluster, tmp_path: Path) -> Iterator[Scenario]:
    run = Scenario(own, tmp_path)
    yield run
    own.run("scancel", "--full", "--signal=KILL", run.job_id, check=False)
    run.scancel()
    wait_until(lambda: not own.run("squeue", "--noheader").stdout.strip(), "the nodes are free again")


def ends_as_undisturbed(run: Scenario, factory: pytest.TempPathFactory) -> None:
    assert run.wait_until_over() == 0, run.story
    assert run.cluster is not None
    wait_until(lambda: not run.cluster.run("squeue", "--noheader").stdout.strip(), "the nodes are free")  # type: ignore[union-attr]
    losses, digest = undisturbed(run.cluster, strategy="ddp", nodes=run.cluster.nodes[:2], make_folder=factory.mktemp)
    assert run.losses == losses, run.story
    assert run.digest == digest, run.story


def nodes_of(run: Scenario, attempt: int = 1) -> list[str]:
    """Nodes of an attempt that has started."""
    nodes = run.lines("start")[attempt - 1]["nodes"]
    assert isinstance(nodes, list)
    return nodes


@pytest.mark.parametrize("which", ["first", "last"])
def test_run_continues_on_other_nodes_after_a_power_cut(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory, which: str
) -> None:
    """The first node runs the batch step: the next supervisor takes over the lease of the lost one."""
    run.train(*PAUSE, checkpoint={"every_steps": 5})
    run.wait_for_step(12)
    lost = nodes_of(run)[0 if which == "first" else 1]
    with taken_away(own, lost):
        run.wait_for_word("starting", attempt=2)
        assert lost not in nodes_of(run, 2), run.story
        run.wait_for_step(13, attempt=2)
    ends_as_undisturbed(run, tmp_path_factory)
    assert run.ends[0] in [("lost", "requeue"), ("failed", "restart")], run.story
    step = run.lines("start")[-1]["checkpoint_step"]
    assert step % 5 == 0
    # The newest checkpoint: the cut itself may take a while on a busy machine. One save may have been in progress.
    assert step == run.lines("end")[0]["checkpoint_step"] > run.lines("end")[0]["last_step"] - 10 >= 0, run.story


def test_run_survives_a_short_outage_of_slurmd(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run.train(*PAUSE)
    run.wait_for_step(5)
    with taken_away(own, nodes_of(run)[1], jobs_go_on=True):
        time.sleep(1)
    ends_as_undisturbed(run, tmp_path_factory)


@pytest.mark.parametrize("nodes", [1, 2])
def test_run_restarts_on_other_nodes_if_slurmd_stays_away(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory, nodes: int
) -> None:
    """Ranks on nodes that Slurm has given up may stay alive, and train beside their replacements."""
    # Without GPUs, which Slurm 22.05 miscounts here ("node offset invalid") until its controller restarts.
    without = {"gpus_per_node": None, "ntasks_per_node": 2}
    run.train("--pause", "1.5", slurm=without, checkpoint={"every_steps": 2})
    run.wait_for_step(4)
    with ExitStack() as away:
        for node in nodes_of(run)[-nodes:]:
            away.enter_context(taken_away(own, node, jobs_go_on=True))
        run.wait_for_word("ready", attempt=2)
        begun = len(run.dir.rank_log(1, 0).read_text().splitlines())
        assert run.wait_until_over() == 0, run.story
        assert len(run.dir.rank_log(1, 0).read_text().splitlines()) <= begun + 2, "the first attempt saves no more"
    ends_as_undisturbed(run, tmp_path_factory)


def test_run_on_a_drained_node_continues_elsewhere_after_a_stop(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The run continues there until it is stopped, and then on other nodes."""
    run.train(*PAUSE)
    run.wait_for_step(4)
    node = nodes_of(run)[1]
    with drained(own, node):
        run.wait_for_step(10)
        assert run.ends == []
        run.cli("stop", "--requeue", run.dir.run_id)
        assert run.wait_until_over() == 0, run.story
    assert node not in nodes_of(run, 2)
    ends_as_undisturbed(run, tmp_path_factory)
    assert run.ends == [("stop", "requeue"), ("completed", "end")]


@pytest.mark.parametrize("daemon", ["slurmctld", "slurmdbd"])
def test_run_survives_an_outage_of_slurmctld_or_slurmdbd(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory, daemon: str
) -> None:
    run.train(*PAUSE)
    run.wait_for_step(5)
    with taken_away(own, daemon):
        run.wait_for_step(20)
    ends_as_undisturbed(run, tmp_path_factory)
    assert run.ends == [("completed", "end")], run.story


@pytest.mark.parametrize("daemon", ["slurmctld", "slurmdbd"])
def test_run_is_requeued_despite_an_outage_of_slurmctld_or_slurmdbd(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory, daemon: str
) -> None:
    run.train(*PAUSE)
    run.wait_for_step(8)
    run.cli("stop", "--requeue", run.dir.run_id)
    with taken_away(own, daemon):
        run.wait_for_word("hpcaccel: stopping")
        time.sleep(8)
    ends_as_undisturbed(run, tmp_path_factory)
    assert run.ends == [("stop", "requeue"), ("completed", "end")], run.story


def test_commands_fail_during_an_outage_of_slurmctld_but_cancel_is_saved(own: Cluster, run: Scenario) -> None:
    """After some seconds they report that Slurm does not respond. A submit leaves no run, a cancel takes effect."""
    run.train(*PAUSE, "--epochs", "400")
    run.wait_for_step(4)
    with taken_away(own, "slurmctld"):
        submitted = run.cli("submit", str(run.folder / "job.yaml"), check=False)
        cancelled = run.cli("cancel", run.dir.run_id, check=False)
        wait_until(lambda: run.ends == [("cancelled", "end")], "the ranks have left")
    for answer in (submitted, cancelled):
        assert answer.returncode == 1, answer.stderr
        assert "has not responded for 5 s" in answer.stderr
    assert f"The request to cancel {run.dir.run_id} is saved in the run directory" in cancelled.stderr
    assert [one["run_id"] for one in json.loads(run.cli("list", "--json").stdout)] == [run.dir.run_id]
    assert run.wait_until_over() == 130, run.story


def test_crash_during_an_outage_of_slurmctld_restarts_the_run(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A restart in place needs the controller too."""
    run.train(*PAUSE, checkpoint={"every_steps": 5})
    run.wait_for_step(8)
    with taken_away(own, "slurmctld"):
        signal_rank(run, 1)
        time.sleep(15)
    ends_as_undisturbed(run, tmp_path_factory)
    assert run.ends == [("failed", "restart"), ("completed", "end")], run.story


def test_stopped_rank_is_detected_as_a_hang_and_the_run_restarts(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run.train(*PAUSE, checkpoint={"every_steps": 5}, resilience={"hang_timeout_seconds": 10})
    run.wait_for_step(12)
    signal_rank(run, 2, signal.SIGSTOP)
    run.wait_for_ends(1)
    end = run.lines("end")[0]
    last_due = end["last_step"] // 5 * 5  # it may have been stopped inside that save
    assert (end["error_class"], end["checkpoint_step"] in (last_due - 5, last_due)) == ("hang", True), run.story
    assert f"rank 2 on {nodes_of(run)[1]}" in end["detail"]
    ends_as_undisturbed(run, tmp_path_factory)
    assert run.ends == [("failed", "restart"), ("completed", "end")], run.story


def test_run_preempted_with_a_short_grace_time_loses_no_step(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run.train(*PAUSE)
    run.wait_for_step(8)
    run.preempt(nodes_of(run))
    ends_as_undisturbed(run, tmp_path_factory)
    assert run.ends == [("preempted", "requeue"), ("completed", "end")], run.story
    assert run.status()["steps_lost"] == 0


def test_save_longer_than_the_grace_time_falls_back_to_the_last_commit(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The save takes longer than the grace time and KillWait together."""
    run.train("--pause", "0.25", "--save-pause", "20", checkpoint={"every_steps": 5})
    run.wait_for_step(9)
    run.preempt(nodes_of(run))
    ends_as_undisturbed(run, tmp_path_factory)
    assert run.ends == [("preempted", "requeue"), ("completed", "end")], run.story
    assert run.lines("end")[1]["resumed_step"] in (5, 10)  # 10 if the urgent job started late


def test_time_limit_shortened_during_a_run_loses_no_step(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run.train("--pause", "2.5", resilience={"warning_seconds": 20})
    run.wait_for_step(2)
    own.run("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=2")
    ends_as_undisturbed(run, tmp_path_factory)
    assert run.ends == [("time_limit", "requeue"), ("completed", "end")], run.story
    assert run.status()["steps_lost"] == 0


def test_second_job_on_a_run_directory_is_refused(
    own: Cluster, run: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It is refused while the first job runs, and while the first job waits in the queue."""
    run.train("--pause", "0.5")
    run.wait_for_step(2)
    assert f"is in use by job {run.job_id}" in said_by_another_job(own, run)
    hold_in_queue(run)
    assert f"continues in job {run.job_id}, and job" in said_by_another_job(own, run)
    assert len(run.lines("start")) == 1
    release(run)
    ends_as_undisturbed(run, tmp_path_factory)
    assert run.ends == [("stop", "requeue"), ("completed", "end")], run.story


def said_by_another_job(own: Cluster, run: Scenario) -> str:
    """Submit the run's script by hand on a free node; return the log of that job."""
    free = next(node for node in own.nodes if node not in nodes_of(run))
    log = run.folder / "second.log"
    second = own.sbatch("--nodes=1", f"--nodelist={free}", f"--output={log}", str(run.dir.script))
    assert own.wait_for(second, ["COMPLETED", "FAILED"])["ExitCode"] == "2:0"
    return log.read_text()
