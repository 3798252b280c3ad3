"""Resume: a training loaded from a checkpoint continues as if it had never stopped."""

import json

import pytest
import torch
import torch.distributed as dist

from hpcaccel.checkpoint import CheckpointEngine, TrainingState
from hpcaccel.checkpoint_files import manifest
from tests.checkpoint.training import OPTIMIZERS, Training
from tests.checkpoint.world import run_ranks


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def interrupted(directory, wrap, optimizer="adamw", *, rank=0, world_size=1, group=None):
    """Losses and final state of a training, and of a second one resumed from the middle of it."""
    options = {"rank": rank, "world_size": world_size, "group": group}
    first = Training(wrap, optimizer, rank=rank)
    first.steps(3)
    CheckpointEngine(directory, **options).save(first.state(), step=3, epoch=1, guarantee="bit-exact")
    expected = first.steps(4), first.digest(), dict(first.scheduler.state_dict())
    second = Training(wrap, optimizer, seed=5, rank=rank)
    second.steps(1)
    loaded = second.load(CheckpointEngine(directory, **options))
    assert (loaded.step, loaded.epoch, loaded.guarantee, loaded.differences) == (3, 1, "bit-exact", ())
    return expected, (second.steps(4), second.digest(), dict(second.scheduler.state_dict()))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_process_without_a_group_resumes_bit_exact(tmp_path, optimizer):
    expected, got = interrupted(tmp_path, "plain", optimizer)
    assert got == expected


def _two_ranks(rank, directory):
    group = dist.new_group(backend="gloo")
    results = {}
    for wrap, optimizer in [("ddp", "adamw"), ("fsdp", "adamw"), ("fsdp", "sgd-momentum"), ("fsdp", "adamw-foreach")]:
        results[wrap, optimizer] = interrupted(
            directory / f"{wrap}-{optimizer}", wrap, optimizer, rank=rank, world_size=2, group=group
        )
    return results


def test_two_ranks_resume_bit_exact(tmp_path):
    for results in run_ranks(_two_ranks, tmp_path):
        for name, (expected, got) in results.items():
            assert got == expected, name
    files = sorted(path.name for path in (tmp_path / "fsdp-adamw" / "step_00000003").iterdir())
    assert files == ["COMMITTED", "index.json", "rank_00000.bin", "rank_00001.bin"]


def _save(rank, world_size, wrap, source, target):
    """Load from ``source`` (None: train), save to ``target``; return the digest without batch norm buffers."""
    training = Training(wrap, seed=3, rank=rank)
    if source is None:
        training.steps(3)
    else:
        training.load(CheckpointEngine(source, rank=rank, world_size=world_size))
    CheckpointEngine(target, rank=rank, world_size=world_size).save(training.state(), step=3)
    return training.digest(buffers=False)


def _save_in_ranks(rank, world_size, wrap, source, target):
    return _save(rank, world_size, wrap, source, target)


def test_state_stays_the_same_at_every_world_size_and_wrapping(tmp_path):
    way = [(2, "fsdp"), (1, "plain"), (3, "fsdp"), (2, "ddp"), (1, "compile"), (4, "hsdp"), (2, "fsdp")]
    digests = set()
    source = None
    for number, (world_size, wrap) in enumerate(way):
        target = tmp_path / str(number)
        if world_size == 1:
            digests.add(_save(0, 1, wrap, source, target))
        else:
            digests.update(run_ranks(_save_in_ranks, world_size, wrap, source, target, world_size=world_size))
        source = target
    assert len(digests) == 1


def _rng_of_a_third_rank(rank, directory):
    engine = CheckpointEngine(directory, rank=rank, world_size=3)
    loaded = engine.load(engine.find(), TrainingState())
    return loaded.per_rank, loaded.guarantee, loaded.differences


def _two_save_their_own(rank, directory):
    state = TrainingState(per_rank={"seen": rank, "noise": torch.full((2,), rank)})
    CheckpointEngine(directory, rank=rank, world_size=2).save(state, step=1, guarantee="bit-exact")


def test_rank_without_saved_state_of_its_own_loads_none(tmp_path):
    run_ranks(_two_save_their_own, tmp_path)
    results = run_ranks(_rng_of_a_third_rank, tmp_path, world_size=3)
    assert [own and own["seen"] for own, _, _ in results] == [0, 1, None]
    assert [own and own["noise"].tolist() for own, _, _ in results] == [[0, 0], [1, 1], None]
    assert {guarantee for _, guarantee, _ in results} == {"state-exact"}
    assert results[0][2] == ("world_size: 2 at the save, 3 now",)


def test_guarantee_reasons_are_loaded_with_the_checkpoint(tmp_path):
    engine = CheckpointEngine(tmp_path)
    engine.save(TrainingState(), step=1, guarantee="state-exact", guarantee_reasons=["a batch was carried along"])
    loaded = engine.load(tmp_path / "step_00000001", TrainingState())
    assert (loaded.guarantee, loaded.differences) == ("state-exact", ("a batch was carried along",))


def test_bit_exact_checkpoint_without_reasons_loads_as_state_exact(tmp_path):
    engine = CheckpointEngine(tmp_path)
    path = engine.save(TrainingState(), step=1, guarantee="bit-exact")
    content = json.loads((path / "COMMITTED").read_text())
    del content["guarantee_reasons"], content["crc32"]
    (path / "COMMITTED").write_bytes(manifest.seal(content))
    loaded = CheckpointEngine(tmp_path).load(path, TrainingState())
    assert loaded.guarantee == "state-exact"
    assert "did not check where the batches came from" in loaded.differences[0]
