"""Damaged checkpoints: damage is detected on load, and all ranks fall back to the same older checkpoint."""

import json
import logging
import shutil

import pytest
import torch

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import CheckpointEngine, TrainingState
from hpcaccel.checkpoint_files import manifest
from hpcaccel.errors import CheckpointError
from tests.checkpoint.training import Training
from tests.checkpoint.world import run_ranks


def flip(path, at, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def contents(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def two(tmp_path):
    """A directory with the checkpoints of steps 1 and 2, and their digests."""
    training, engine, digests = Training("plain"), CheckpointEngine(tmp_path / "checkpoints"), {}
    for step in (1, 2):
        training.steps(1)
        engine.save(training.state(), step=step)
        digests[step] = training.digest()
    return tmp_path / "checkpoints", digests


def test_load_detects_a_flipped_bit_and_names_the_file(two):
    directory, _ = two
    path = directory / "step_00000002"
    engine = CheckpointEngine(directory)
    training = Training("plain", seed=4)
    for name in ("rank_00000.bin", "index.json", checkpoint_files.MANIFEST):
        size = (path / name).stat().st_size
        for at in sorted({0, 1, size // 3, size // 2, size - 2, size - 1, *range(0, size, max(1, size // 40))}):
            flip(path / name, at, bit=at % 8)
            with pytest.raises(CheckpointError) as caught:
                engine.load(path, training.state(), fall_back=False)
            assert str(path / name) in str(caught.value), (name, at)
            flip(path / name, at, bit=at % 8)
    assert engine.load(path, training.state(), fall_back=False).step == 2


def truncate(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def zero_a_page(path):
    data = path.read_bytes()
    path.write_bytes(bytes(4096) + data[4096:])


@pytest.mark.parametrize("name", ["rank_00000.bin", "index.json", checkpoint_files.MANIFEST])
@pytest.mark.parametrize("harm", [truncate, zero_a_page, lambda path: path.unlink(), lambda path: flip(path, 200)])
def test_load_falls_back_and_quarantines_the_damaged_checkpoint(two, name, harm, caplog):
    directory, digests = two
    harm(directory / "step_00000002" / name)
    engine = CheckpointEngine(directory)
    training = Training("plain", seed=4)
    loaded = training.load(engine)
    assert loaded.path == directory / "step_00000001"
    assert training.digest() == digests[1]
    assert contents(directory) == ["quarantined_step_00000002", "step_00000001"]
    assert "quarantined_step_00000002" in caplog.text
    engine.save(training.state(), step=2)
    assert contents(directory) == ["quarantined_step_00000002", "step_00000001", "step_00000002"]


def test_resume_fails_if_every_checkpoint_is_damaged(two):
    directory, _ = two
    flip(directory / "step_00000002" / checkpoint_files.MANIFEST, 30)
    flip(directory / "step_00000001" / "rank_00000.bin", 30)
    engine = CheckpointEngine(directory)
    path = engine.find("auto")
    with pytest.raises(CheckpointError, match=r"no intact checkpoint is left in .*quarantined_step_00000001"):
        engine.load(path, Training("plain").state())
    with pytest.raises(CheckpointError, match="no intact checkpoint is left"):
        CheckpointEngine(directory).find("auto")
    assert CheckpointEngine(directory).find(None) is None


def test_damaged_checkpoint_of_another_directory_is_not_renamed(two, tmp_path):
    directory, _ = two
    flip(directory / "step_00000002" / "rank_00000.bin", 30)
    engine = CheckpointEngine(tmp_path / "another")
    with pytest.raises(CheckpointError, match=r"rank_00000\.bin is damaged: the CRC of models"):
        engine.load(directory / "step_00000002", Training("plain").state())
    (directory / "step_00000002" / "rank_00000.bin").unlink()
    assert engine.find(directory) == directory / "step_00000001"
    (directory / "step_00000001" / "rank_00000.bin").unlink()
    with pytest.raises(CheckpointError, match="only damaged ones: step_00000002, step_00000001"):
        engine.find(directory)
    assert contents(directory) == ["step_00000001", "step_00000002"]


def _fall_back_together(rank, directory):
    training = Training("fsdp", rank=rank)
    engine = CheckpointEngine(directory, rank=rank, world_size=2)
    digests = {}
    for step in (1, 2, 3):
        training.steps(1)
        engine.save(training.state(), step=step)
        digests[step] = training.digest()
    if rank == 0:
        flip(directory / "step_00000003" / "rank_00001.bin", 500)  # only rank 1 reads it
        shutil.rmtree(directory / "step_00000001", ignore_errors=True)
    engine = CheckpointEngine(directory, rank=rank, world_size=2)
    again = Training("fsdp", seed=8, rank=rank)
    loaded = again.load(engine)
    return loaded.step, again.digest() == digests[2]


def test_all_ranks_fall_back_to_the_same_checkpoint(tmp_path):
    assert run_ranks(_fall_back_together, tmp_path) == [(2, True), (2, True)]
    assert contents(tmp_path) == ["quarantined_step_00000003", "step_00000002"]


def test_shard_file_of_another_checkpoint_is_detected(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        CheckpointEngine(tmp_path / name).save(Training("plain", seed=seed).state(), step=1)
    (tmp_path / "a/step_00000001/rank_00000.bin").replace(tmp_path / "b/step_00000001/rank_00000.bin")
    with pytest.raises(CheckpointError, match="is damaged"):
        CheckpointEngine(tmp_path / "b").load(tmp_path / "b/step_00000001", Training("plain").state(), fall_back=False)


def test_load_and_save_never_use_pickle(two, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a pickle was opened")

    import pickle

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    directory, _ = two
    engine = CheckpointEngine(directory)
    training = Training("plain")
    assert training.load(engine).step == 2
    engine.save(training.state(), step=3)


def test_manifest_of_a_newer_format_is_refused(two):
    directory, _ = two
    path = directory / "step_00000002" / checkpoint_files.MANIFEST
    content = {**json.loads(path.read_text()), "version": 99}
    path.write_bytes(manifest.seal(content))
    with pytest.raises(CheckpointError, match="format version 99, written by a newer hpcaccel"):
        CheckpointEngine(directory).load(path.parent, TrainingState())
    assert path.exists()


def test_different_model_is_an_error_that_names_the_differences(two, caplog):
    caplog.set_level(logging.WARNING)
    directory, _ = two
    training = Training("plain")
    training.model.head = torch.nn.Linear(7, 12)
    training.model.more = torch.nn.Linear(1, 1)
    training.optimizer = torch.optim.AdamW(training.model.parameters())
    with pytest.raises(CheckpointError) as caught:
        training.load(CheckpointEngine(directory))
    text = str(caught.value)
    assert "models.0.more.weight is not in the checkpoint" in text
    assert "models.0.head.weight has shape (11, 7) in the checkpoint, (12, 7) in this model" in text
    assert contents(directory) == ["step_00000001", "step_00000002"]  # not quarantined
