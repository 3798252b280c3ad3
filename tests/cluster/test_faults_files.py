"""Damaged checkpoint files on a real Slurm: all ranks fall back to the same older step, or the run fails."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel import checkpoint_files

from .dev_cluster import Cluster, wait_until
from .injectors import DAMAGES, files_of, hold_in_queue, release
from .scenario import Scenario

pytestmark = pytest.mark.chaos

Lease = Callable[[int], list[str]]
Exact = Callable[..., None]


@pytest.fixture
def waiting(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    """A run with at least 10 checkpoints, whose job is held in the queue."""
    run = Scenario(cluster, tmp_path, nodes=lease(2))
    run.train("--pause", "0.5", checkpoint={"every_steps": 2, "keep": None})
    wait_until(
        lambda: len(checkpoint_files.committed(run.dir.checkpoints)) >= 10, "10 checkpoints", timeout_seconds=120
    )
    hold_in_queue(run)
    return run


def newest_first(run: Scenario) -> list[checkpoint_files.Checkpoint]:
    return checkpoint_files.committed(run.dir.checkpoints)[::-1]


def falls_back_to(run: Scenario, good: checkpoint_files.Checkpoint, damaged: list[checkpoint_files.Checkpoint]) -> None:
    release(run)
    assert run.wait_until_over() == 0, run.story
    assert run.ends == [("stop", "requeue"), ("completed", "end")], run.story
    assert run.lines("end")[1]["resumed_step"] == good.step, run.story
    quarantined = {path.name for path in run.dir.checkpoints.glob("quarantined_*")}
    assert quarantined == {f"quarantined_{item.name}" for item in damaged}, run.story


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damage_to_any_file_of_a_checkpoint_falls_back_to_an_older_one(
    waiting: Scenario, assert_exact: Exact, damage: str
) -> None:
    """Each file is damaged in a different checkpoint; one start skips all of them."""
    dice = random.Random(damage)
    newest, *rest = newest_first(waiting)
    names = [file.relative_to(newest.path) for file in files_of(newest.path)]
    assert len(names) >= 6, names
    damaged = [newest, *rest][: len(names)]
    good = rest[len(names) - 1]
    for name, checkpoint in zip(names, damaged, strict=True):
        DAMAGES[damage](checkpoint.path / name, dice)
    falls_back_to(waiting, good, damaged)
    assert_exact(waiting)


def test_run_fails_if_every_checkpoint_is_damaged(waiting: Scenario) -> None:
    """It does not start again at step 0."""
    dice = random.Random(0)
    kinds = sorted(DAMAGES)
    for number, checkpoint in enumerate(newest_first(waiting)):
        DAMAGES[kinds[number % len(kinds)]](dice.choice(files_of(checkpoint.path)), dice)
    steps = len(waiting.losses)
    release(waiting)
    assert waiting.wait_until_over() == 1, waiting.story
    status = waiting.status()
    assert status["state"] == "failed"
    assert "no intact checkpoint is left" in status["detail"], waiting.story
    assert len(waiting.losses) == steps, "nothing was trained"


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (str(self.mark),))


def test_pickles_in_checkpoints_are_never_loaded(waiting: Scenario, assert_exact: Exact, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(mark))
    newest, second, third, fourth, good = newest_first(waiting)[:5]
    for place in (waiting.dir.checkpoints, *(item.path for item in newest_first(waiting))):
        for name in (".metadata", "data.pkl", "__0_0.distcp", "pytorch_model.bin", "random_states_0.pkl"):
            (place / name).write_bytes(bomb)
    for item, name in ((newest, "COMMITTED"), (second, "index.json")):
        (item.path / name).write_bytes(bomb)
    for item in (third, fourth):
        shard = next(path for path in files_of(item.path) if path.name.startswith("rank_"))
        shard.write_bytes(bomb.ljust(shard.stat().st_size, b"\0"))
    falls_back_to(waiting, good, [newest, second, third, fourth])
    assert not mark.exists()
    assert_exact(waiting)
    pickle.loads(bomb)
    assert mark.exists(), "the bomb works"


def test_damage_between_attempts_falls_back_to_an_older_checkpoint(
    cluster: Cluster, lease: Lease, tmp_path: Path, assert_exact: Exact
) -> None:
    """The first attempt ends by a failure, not by a stop, and no supervisor runs during the damage."""
    run = Scenario(cluster, tmp_path, nodes=lease(2))
    run.train("--pause", "0.25", checkpoint={"every_steps": 4}, resilience={"restart_in_place": 0})
    run.wait_for_step(14)
    os.kill(int(run.wait_for_word("starting", rank=1).split()[1]), 9)
    run.wait_for_ends(1)
    newest, good = newest_first(run)
    DAMAGES["bit flip"](newest.path / "rank_00002.bin", random.Random(0))
    assert run.wait_until_over() == 0, run.story
    assert run.ends == [("failed", "requeue"), ("completed", "end")], run.story
    assert run.lines("end")[1]["resumed_step"] == good.step, run.story
    assert (run.dir.checkpoints / f"quarantined_{newest.name}").is_dir()
    assert_exact(run)
