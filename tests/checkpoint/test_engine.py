"""``CheckpointEngine`` in one process: find, save, retention, and checkpoints that are superseded."""

import threading

import pytest

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import CheckpointEngine, TrainingState, commit
from hpcaccel.errors import CheckpointError


class Counter:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def save(engine, *steps):
    for step in steps:
        engine.save(TrainingState(objects={"counter": Counter(step)}), step=step, reason="due")


def steps_of(directory):
    return [checkpoint.step for checkpoint in checkpoint_files.committed(directory)]


def load(engine, resume="auto"):
    counter = Counter()
    engine.load(engine.find(resume), TrainingState(objects={"counter": counter}))
    return counter.value


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    engine = CheckpointEngine(tmp_path, keep=2)
    save(engine, 1, 2, 3)
    assert steps_of(tmp_path) == [2, 3]
    save(engine, 4)
    assert steps_of(tmp_path) == [3, 4]
    engine.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000004"]


def test_old_checkpoint_is_renamed_at_once_and_deleted_before_next_save(tmp_path, monkeypatch):
    told = []
    begin, goes_on, delete = commit.begin, threading.Event(), commit.delete
    monkeypatch.setattr(commit, "delete", lambda doomed: goes_on.wait(60) and delete(doomed))
    monkeypatch.setattr(commit, "begin", lambda path: (told.append(sorted(tmp_path.glob(".*"))), begin(path)))
    engine = CheckpointEngine(tmp_path, keep=1)
    save(engine, 1, 2)
    assert steps_of(tmp_path) == [2]
    assert list(tmp_path.glob(".*"))
    goes_on.set()
    save(engine, 3)
    engine.close()
    assert told == [[], [], []]
    assert steps_of(tmp_path) == [3]


def test_keep_none_keeps_every_checkpoint_and_keep_zero_is_refused(tmp_path):
    save(CheckpointEngine(tmp_path, keep=None), 1, 2, 3)
    assert steps_of(tmp_path) == [1, 2, 3]
    with pytest.raises(CheckpointError, match="keep=0 must be at least 1"):
        CheckpointEngine(tmp_path, keep=0)


def test_damaged_checkpoint_does_not_count_towards_keep(tmp_path):
    engine = CheckpointEngine(tmp_path, keep=2)
    save(engine, 1, 2)
    (tmp_path / "step_00000002" / "index.json").unlink()
    save(engine, 3)
    assert steps_of(tmp_path) == [1, 2, 3]


def test_old_checkpoint_is_deleted_only_after_the_new_one_is_committed(tmp_path):
    engine = CheckpointEngine(tmp_path, keep=1)
    save(engine, 1)
    with pytest.raises(CheckpointError):
        engine.save(TrainingState(per_rank={"f": print}), step=2)
    assert steps_of(tmp_path) == [1]


def test_a_committed_step_is_not_written_again(tmp_path):
    engine = CheckpointEngine(tmp_path)
    save(engine, 5)
    before = (tmp_path / "step_00000005" / checkpoint_files.MANIFEST).stat()
    path = engine.save(TrainingState(objects={"counter": Counter(99)}), step=5, reason="preempted")
    assert path == tmp_path / "step_00000005"
    assert (path / checkpoint_files.MANIFEST).stat().st_ino == before.st_ino
    assert load(engine) == 5


def test_manifest_records_step_reason_guarantee_and_file_sizes(tmp_path):
    path = CheckpointEngine(tmp_path, attempt=3).save(
        TrainingState(), step=7, epoch=2, reason="preempted", guarantee="bit-exact"
    )
    facts = checkpoint_files.newest(tmp_path).manifest
    expected = {"version": 1, "step": 7, "epoch": 2, "reason": "preempted", "guarantee": "bit-exact", "world_size": 1}
    assert expected.items() <= facts.items()
    assert facts["attempt"] == 3
    assert {name: file["bytes"] for name, file in facts["files"].items()} == {
        file.name: file.stat().st_size for file in path.iterdir() if file.name != checkpoint_files.MANIFEST
    }


def test_find_accepts_auto_a_name_a_path_and_a_run_directory(tmp_path):
    run = tmp_path / "run"
    engine = CheckpointEngine(run / "checkpoints")
    assert engine.find("auto") is None
    save(engine, 1, 2)
    newest = run / "checkpoints" / "step_00000002"
    assert engine.find("auto") == newest
    assert engine.find(None) is None
    assert engine.find("step_00000001") == run / "checkpoints" / "step_00000001"
    other = CheckpointEngine(tmp_path / "other")
    assert [other.find(place) for place in (newest, str(newest), newest.parent, run)] == [newest] * 4
    with pytest.raises(CheckpointError, match=r"cannot resume from step_00000009: .*step_00000001, step_00000002"):
        engine.find("step_00000009")


def test_newer_checkpoints_are_superseded_after_resume_from_an_older_one(tmp_path):
    save(CheckpointEngine(tmp_path, keep=None), 1, 2, 3)
    engine = CheckpointEngine(tmp_path, keep=None)
    assert load(engine, "step_00000001") == 1
    assert steps_of(tmp_path) == [1, 2, 3]
    engine.save(TrainingState(objects={"counter": Counter(20)}), step=2)
    assert steps_of(tmp_path) == [1, 2]
    assert load(CheckpointEngine(tmp_path)) == 20
    assert sorted(path.name for path in tmp_path.glob("superseded*")) == [
        "superseded_step_00000002",
        "superseded_step_00000003",
    ]


def test_start_from_scratch_supersedes_checkpoints_found_on_disk(tmp_path):
    save(CheckpointEngine(tmp_path), 5, 9)
    engine = CheckpointEngine(tmp_path)
    assert engine.find(None) is None
    engine.save(TrainingState(objects={"counter": Counter(50)}), step=5)
    assert steps_of(tmp_path) == [5]
    assert load(CheckpointEngine(tmp_path)) == 50


def test_save_without_resume_leaves_checkpoints_of_later_steps_alone(tmp_path):
    save(CheckpointEngine(tmp_path, keep=None), 5, 9, 10)
    save(CheckpointEngine(tmp_path, keep=1), 7)
    assert steps_of(tmp_path) == [7, 9, 10]


def test_checkpoint_of_another_training_at_the_same_step_is_superseded(tmp_path):
    save(CheckpointEngine(tmp_path), 5)
    CheckpointEngine(tmp_path).save(TrainingState(objects={"counter": Counter(50)}), step=5)
    assert load(CheckpointEngine(tmp_path)) == 50
    assert (tmp_path / "superseded_step_00000005").exists()


def test_resume_from_the_newest_checkpoint_supersedes_nothing(tmp_path):
    save(CheckpointEngine(tmp_path, keep=None), 1, 2)
    engine = CheckpointEngine(tmp_path, keep=None)
    load(engine)
    save(engine, 2, 3)
    assert steps_of(tmp_path) == [1, 2, 3]


def test_unreadable_file_is_an_error_and_not_treated_as_damage(tmp_path, monkeypatch):
    engine = CheckpointEngine(tmp_path)
    save(engine, 1)

    def refuse(*_, **__):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(CheckpointError, match="Stale file handle"):
        engine.load(tmp_path / "step_00000001", TrainingState(objects={"counter": Counter()}))
    monkeypatch.undo()
    assert steps_of(tmp_path) == [1]
