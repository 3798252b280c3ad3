"""A run that is disturbed again and again, at random moments, in every way that there is."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel import layout
from hpcaccel.process import process_start
from hpcaccel.rundir import read_lines

from .dev_cluster import Cluster, wait_until
from .scenario import Scenario, settled

EVENTS = 8


def kill_a_rank(run: Scenario, dice: random.Random) -> None:
    attempt = run.lines("start")[-1]["attempt"]
    pid = int(run.wait_for_word("starting", attempt=attempt, rank=dice.randrange(4)).split()[1])
    if process_start(pid) is not None:
        os.kill(pid, signal.SIGKILL)


def preempt(run: Scenario, dice: random.Random) -> None:
    run.preempt(dice.sample(run.nodes, dice.choice([1, 2])))


def stop(run: Scenario, dice: random.Random) -> None:
    run.cli("stop", "--requeue", run.dir.run_id)


def requeue_by_hand(run: Scenario, dice: random.Random) -> None:
    assert run.cluster is not None
    run.cluster.run("scontrol", "requeue", run.job_id, check=False)  # it may have ended a moment ago


def is_over(run: Scenario) -> bool:
    return bool(run.ends) and run.ends[-1][1] == "end"


def trains(run: Scenario) -> bool:
    """Whether the newest attempt has done a step and has not ended."""
    attempt = run.lines("start")[-1]["attempt"]
    steps = [line for line, _ in read_lines(run.dir.metrics) if line["attempt"] == attempt]
    return bool(steps) and len(run.lines("end")) < len(run.lines("start"))


@pytest.mark.chaos
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("seed", [0, 1])
def test_bit_identical_after_all_that(
    cluster: Cluster,
    lease: Callable[[int], list[str]],
    tmp_path: Path,
    assert_exact: Callable[..., None],
    seed: int,
    strategy: str,
) -> None:
    dice = random.Random(seed)
    run = Scenario(cluster, tmp_path, nodes=lease(2))
    run.train(
        "--pause", "0.8", "--always",
        runtime={"strategy": strategy},
        slurm={"partition": dice.choice(["gpu", "gpu0"])},
        checkpoint={"every_steps": 2},
        resilience={"max_failures": 100, "restart_in_place": 100},
    )  # fmt: skip
    saved = -1
    for _ in range(EVENTS):

        def goes_on(before: int = saved) -> bool:
            newest = layout.newest(run.dir.checkpoints)
            return is_over(run) or (newest is not None and newest.step > before and trains(run))

        wait_until(goes_on, f"a checkpoint after step {saved}", timeout_seconds=180)
        newest = layout.newest(run.dir.checkpoints)
        assert newest is not None
        saved = newest.step
        settled(dice.uniform(0, 1.5))
        if is_over(run):
            break
        dice.choice([kill_a_rank, preempt, stop, requeue_by_hand])(run, dice)
    assert run.wait_until_over() == 0, run.story
    assert len(run.lines("start")) > 3, run.story  # on a slow machine it is over before all has happened
    assert_exact(run, strategy=strategy)
