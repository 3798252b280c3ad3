"""Failed saves: the same error on all ranks, no partial checkpoint, older checkpoints unchanged."""

import os
import re
import shutil
import signal
from typing import Any

import pytest
import torch

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import CheckpointEngine, TrainingState, commit, dcp_storage
from hpcaccel.errors import CheckpointError
from tests.checkpoint.training import Training
from tests.checkpoint.world import Killed, run_ranks


class Holder:
    """A registered object."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


def contents(directory):
    return sorted(path.name for path in directory.iterdir())


def _message(engine, state, step):
    with pytest.raises(CheckpointError) as caught:
        engine.save(state, step=step)
    return str(caught.value)


def _fail_in_turn(rank, directory):
    """Fail several saves, then save once more: the errors, the contents before that save, and the digest."""
    engine = CheckpointEngine(directory, rank=rank, world_size=2)
    training = Training("ddp", rank=rank)
    training.steps(1)
    engine.save(training.state(), step=1)
    messages = []

    state = training.state()
    if rank == 1:
        state.per_rank["hook"] = print
    messages.append(_message(engine, state, 2))

    state = training.state()
    state.objects["sampler"] = Holder({"fn": lambda: None})
    messages.append(_message(engine, state, 2))

    if rank == 1:
        dcp_storage.ALIGNMENT_BYTES = 0  # a bug of ours while writing: division by zero
    messages.append(_message(engine, training.state(), 2))
    dcp_storage.ALIGNMENT_BYTES = 64

    module: Any = commit
    if rank == 0:
        module.os.rename, rename = _refuse, module.os.rename
    messages.append(_message(engine, training.state(), 2))
    if rank == 0:
        module.os.rename = rename
        module.fsync_directory, sync = _not_the_parent, module.fsync_directory
    messages.append(_message(engine, training.state(), 2))
    if rank == 0:
        module.fsync_directory = sync
    left = contents(directory)
    engine.save(training.state(), step=2)
    return messages, left, training.digest(buffers=False)


def _refuse(*_):
    raise PermissionError(13, "Permission denied")


def _not_the_parent(path):
    if path.name == "checkpoints":
        raise OSError(5, "Input/output error")


def test_failure_on_one_rank_raises_on_all_and_leaves_no_files(tmp_path):
    directory = tmp_path / "checkpoints"
    (messages, left, digest), (other_messages, _, _) = run_ranks(_fail_in_turn, directory)
    assert messages == other_messages
    unsupported, both, mistake, no_rename, not_durable = messages
    assert "rank.1['hook'] is a builtin_function_or_method" in unsupported
    assert "(rank 1 on " in unsupported
    assert "objects.sampler['fn'] is a function" in both
    assert "and 1 more)" in both
    assert "ZeroDivisionError" in mistake
    assert "(rank 1 on " in mistake
    assert "Permission denied" in no_rename
    assert "Input/output error" in not_durable
    assert left == ["step_00000001"]
    assert contents(directory) == ["step_00000001", "step_00000002"]
    again = Training("plain", seed=9)
    again.load(CheckpointEngine(directory))
    assert again.digest(buffers=False) == digest
    assert again.steps(1)


def _fill_the_disk(rank, directory):
    engine = CheckpointEngine(directory, rank=rank, world_size=2)
    engine.save(TrainingState(), step=1)
    large = {"large": torch.zeros(1 << 20)} if rank == 1 else {}
    return _message(engine, TrainingState(per_rank=large), 2)


def test_full_disk_on_one_rank_raises_on_all_and_frees_the_space(mounted):
    disk = mounted("size=1m")
    message, other = run_ranks(_fill_the_disk, disk)
    assert contents(disk) == ["step_00000001"]
    assert message == other
    assert "rank_00001.bin: No space left on device" in message
    needed = re.search(r"rank_00001.bin: [^;]+; it needs ([\d,]+) bytes, ([\d,]+) are free", message)
    assert needed is not None, message
    assert int(needed[1].replace(",", "")) >= 4 << 20 > int(needed[2].replace(",", ""))


KILLS = {
    "while planning": ("rank 1", "collect"),
    "between two chunks": ("rank 1", "raw_bytes"),
    "between the files and the manifest": ("rank 0", "write_manifest"),
    "between the manifest and the rename": ("rank 0", "publish"),
    "between the rename and the end": ("rank 0", "retire"),
}


def _killed(rank, directory, who, where):
    engine = CheckpointEngine(directory, rank=rank, world_size=2, attempt=1)
    training = Training("ddp", rank=rank)
    training.steps(1)
    engine.save(training.state(), step=1)
    training.steps(1)
    if who == f"rank {rank}":
        from hpcaccel.checkpoint import saving

        place = {
            "collect": saving,
            "raw_bytes": dcp_storage,
            "write_manifest": commit,
            "publish": commit,
            "retire": commit,
        }[where]
        setattr(place, where, _die)
    engine.save(training.state(), step=2)


def _die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("when", KILLS)
def test_kill_during_a_save_leaves_only_complete_checkpoints(tmp_path, when):
    results = run_ranks(_killed, tmp_path, *KILLS[when], world_size=2)
    killed = results[int(KILLS[when][0].removeprefix("rank "))]
    assert isinstance(killed, Killed)
    assert killed.args == (-signal.SIGKILL,)
    assert "hangs" not in str(results)
    committed = [checkpoint.step for checkpoint in checkpoint_files.committed(tmp_path)]
    assert committed == ([1, 2] if when == "between the rename and the end" else [1])
    again = Training("plain", seed=9)
    engine = CheckpointEngine(tmp_path, attempt=2)
    assert again.load(engine).step == committed[-1]
    engine.save(again.state(), step=committed[-1] + 1)
    engine.close()
    assert not [name for name in contents(tmp_path) if name.endswith(".tmp")]


def test_error_before_the_first_write_leaves_no_directory(tmp_path):
    directory = tmp_path / "checkpoints"
    with pytest.raises(CheckpointError, match=r"per_rank|rank\.0\['f'\]"):
        CheckpointEngine(directory).save(TrainingState(per_rank={"f": print}), step=1)
    assert not directory.exists()


def test_directory_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="checkpoint of step 1 cannot be saved"):
        CheckpointEngine(tmp_path / "checkpoints").save(TrainingState(), step=1)


def test_save_fails_if_a_file_was_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp_storage.ShardWriter, "write", lambda *args: [])
    with pytest.raises(CheckpointError, match="0 of 1 files were written"):
        CheckpointEngine(tmp_path).save(Training("plain").state(), step=1)
    assert contents(tmp_path) == []


def test_save_fails_if_a_part_of_a_tensor_was_not_written(tmp_path, monkeypatch):
    def smaller(*args):
        first, *others = planned(*args)
        return [first._replace(shape=[1, *first.shape[1:]]), *others]

    planned = dcp_storage.planned_chunks
    monkeypatch.setattr(dcp_storage, "planned_chunks", smaller)
    with pytest.raises(CheckpointError, match=r"\d+ of the \d+ elements of models\.0\.embed\.weight were written"):
        CheckpointEngine(tmp_path).save(Training("plain").state(), step=1)
    assert contents(tmp_path) == []


def test_temporary_directory_of_an_earlier_attempt_is_removed(tmp_path):
    left = tmp_path / checkpoint_files.temporary_name(7, 3)
    left.mkdir()
    (left / "rank_00000.bin").write_bytes(b"half")
    shutil.copytree(left, tmp_path / "mine")
    CheckpointEngine(tmp_path).save(TrainingState(), step=1)
    assert contents(tmp_path) == ["mine", "step_00000001"]
