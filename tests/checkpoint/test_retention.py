"""Retention: the newest intact checkpoints, milestones and pinned ones stay; none is deleted before a newer commit."""

import pytest

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import CheckpointEngine, TrainingState, commit
from hpcaccel.errors import CheckpointError


class Counter:
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def save(engine, *steps):
    for step in steps:
        engine.save(TrainingState(objects={"counter": Counter()}), step=step)


def steps(directory):
    return [checkpoint.step for checkpoint in checkpoint_files.committed(directory)]


def test_keep_every_keeps_the_first_checkpoint_of_each_interval(tmp_path):
    save(CheckpointEngine(tmp_path, keep=2, keep_every=100), 50, 90, 100, 150, 199, 230, 270, 299, 350)
    assert steps(tmp_path) == [100, 230, 299, 350]
    save(CheckpointEngine(tmp_path, keep=1, keep_every=100), 400, 410)
    assert steps(tmp_path) == [100, 230, 350, 400, 410]
    save(CheckpointEngine(tmp_path, keep=1), 500)
    assert steps(tmp_path) == [500]


def test_damaged_checkpoint_is_not_kept_as_a_milestone(tmp_path):
    save(CheckpointEngine(tmp_path, keep=None), 100, 110, 120)
    (tmp_path / "step_00000100" / "rank_00000.bin").unlink()
    save(CheckpointEngine(tmp_path, keep=1, keep_every=100), 130)
    assert 110 in steps(tmp_path)
    assert 120 not in steps(tmp_path)


def test_pinned_checkpoint_stays_until_it_is_unpinned(tmp_path):
    engine = CheckpointEngine(tmp_path, keep=1)
    save(engine, 1)
    pin = tmp_path / "step_00000001" / checkpoint_files.PINNED
    pin.write_text("{}")
    save(engine, 2, 3)
    assert steps(tmp_path) == [1, 3]
    assert not commit.has_adopted(pin.parent)
    pin.unlink()
    save(engine, 4)
    assert steps(tmp_path) == [4]


def test_only_intact_checkpoints_count_and_none_is_deleted_before_commit(tmp_path, monkeypatch):
    engine = CheckpointEngine(tmp_path, keep=2)
    save(engine, 1, 2, 3)
    (tmp_path / "step_00000003" / "rank_00000.bin").write_bytes(b"")
    save(engine, 4)
    assert steps(tmp_path) == [2, 3, 4]
    monkeypatch.setattr(commit, "publish", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match="No space left"):
        save(engine, 5)
    assert steps(tmp_path) == [2, 3, 4]


def test_keep_none_deletes_nothing(tmp_path):
    save(CheckpointEngine(tmp_path, keep=None), *range(1, 6))
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
