"""Checkpoints of several blocks of ranks, on real ranks with blocks of two."""

from __future__ import annotations

import json
import shutil
import zlib
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpcaccel.checkpoint import CheckpointEngine, TrainingState, commit, rank_blocks
from hpcaccel.checkpoint.formats import ConvertRequest, convert
from hpcaccel.checkpoint.rank_blocks import Block, block_of, stored_file
from hpcaccel.checkpoint_files import manifest
from hpcaccel.checkpoint_files.contents import OWN_KEYS
from hpcaccel.checkpoint_files.verify import verify
from hpcaccel.errors import CheckpointError
from hpcaccel.view.checkpoint_tables import list_checkpoints
from tests.checkpoint.test_damage import flip
from tests.checkpoint.training import Training
from tests.checkpoint.world import run_ranks

pytestmark = pytest.mark.torch

RANKS = 4


def test_files_of_one_block_lie_in_the_checkpoint_itself_and_others_in_folders():
    assert block_of(63, 64) is None
    assert stored_file(63, 64) == "rank_00063.bin"
    assert block_of(63, 65) == Block("block_00000", 64)
    assert block_of(64, 65) == Block("block_00001", 1)
    assert stored_file(64, 65) == "block_00001/rank_00064.bin"


def files_in(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


# -- saves and loads ---------------------------------------------------------------------------------------------------


def _save(rank, directory, wrap, block):
    rank_blocks.BLOCK = block
    training = Training(wrap, rank=rank)
    engine = CheckpointEngine(directory, rank=rank, world_size=RANKS)
    for step in (1, 2):
        training.steps(1)
        engine.save(training.state(), step=step)
    return training.digest(buffers=False), {name: value.numpy() for name, value in training.whole().items()}


def _load(rank, directory, wrap, world_size):
    rank_blocks.BLOCK = 2
    training = Training(wrap, seed=5, rank=rank)
    loaded = training.load(CheckpointEngine(directory, rank=rank, world_size=world_size))
    return training.digest(buffers=False), loaded.step


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function of a wrapping: directory with checkpoints of steps 1 and 2, digest and whole state of step 2."""

    @cache
    def save(wrap, block=2):
        directory = tmp_path_factory.mktemp(wrap)
        return directory, *run_ranks(_save, directory, wrap, block, world_size=RANKS)[0]

    return save


@pytest.mark.parametrize("wrap", ["fsdp", "ddp", "hsdp"])
def test_each_block_has_a_folder_and_every_byte_is_verified(saved, wrap):
    path = saved(wrap)[0] / "step_00000002"
    assert {"block_00000/rank_00001.bin", "block_00001/rank_00002.bin"} < files_in(path)
    assert not list(path.glob("rank_*"))
    report = verify(path)
    assert (report.problems, report.notes) == ([], [])
    assert report.bytes == sum(file.stat().st_size for file in path.rglob("*.*"))


@pytest.mark.parametrize(
    ("before", "after", "world_size"),
    [("fsdp", "ddp", 2), ("ddp", "ddp", 4), ("ddp", "fsdp", 3), ("hsdp", "hsdp", 4), ("hsdp", "fsdp", 3)],
)
def test_any_number_of_ranks_in_any_layout_loads_it(saved, before, after, world_size):
    directory, digest, _ = saved(before)
    assert run_ranks(_load, directory, after, world_size, world_size=world_size) == [(digest, 2)] * world_size


def test_shards_that_replicas_in_other_blocks_have_written_are_loaded(saved):
    directory, digest, _ = saved("hsdp", block=1)
    assert (directory / "step_00000002" / "block_00003").is_dir()
    assert run_ranks(_load, directory, "hsdp", RANKS, world_size=RANKS) == [(digest, 2)] * RANKS


def test_one_rank_loads_it(saved):
    directory, digest, _ = saved("fsdp")
    training = Training("plain", seed=5)
    assert training.load(CheckpointEngine(directory)).step == 2
    assert training.digest(buffers=False) == digest


def test_it_is_converted(saved, tmp_path):
    directory, _, whole = saved("fsdp")
    convert(ConvertRequest(str(directory / "step_00000002"), str(tmp_path / "out"), "safetensors"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found
    for name, value in found.items():
        assert "running" in name or torch.equal(value, torch.from_numpy(whole[name])), name


# -- which parts are read ----------------------------------------------------------------------------------------------


def _load_and_note(rank, directory, world_size, wrap="fsdp"):
    """What ``_load`` returns, and the JSON files that this rank has read."""
    read, original = [], manifest.read_file

    def note(path):
        read.append(str(path.relative_to(directory / "step_00000002")))
        return original(path)

    manifest.read_file = note
    return *_load(rank, directory, wrap, world_size), set(read)


@pytest.fixture
def sharded(saved):
    """Directory with checkpoints of steps 1 and 2, in which every weight is split over all ranks; digest of step 2."""
    return saved("fsdp")[:2]


def test_rank_that_loads_what_it_has_saved_reads_the_part_of_its_own_block(sharded):
    directory, digest = sharded
    found = run_ranks(_load_and_note, directory, RANKS, world_size=RANKS)
    assert [rank[:2] for rank in found] == [(digest, 2)] * RANKS
    own = [{f"block_0000{rank // 2}/{name}" for name in ("files.json", "index.json")} for rank in range(RANKS)]
    checked = [{f"block_0000{rank}/files.json"} if rank < 2 else set() for rank in range(RANKS)]
    first = [{"COMMITTED", "index.json"}, set(), set(), set()]
    assert [rank[2] for rank in found] == [own[rank] | checked[rank] | first[rank] for rank in range(RANKS)]


def test_rank_of_a_hybrid_sharding_reads_the_parts_of_its_replicas_too(saved):
    """Ranks 0 and 2 have the same chunks, of which each has saved some, and so have 1 and 3."""
    directory, digest, _ = saved("hsdp", block=1)
    table = json.loads((directory / "step_00000002" / "block_00003" / "files.json").read_bytes())
    assert table["beside"] == ["block_00001"]
    found = run_ranks(_load_and_note, directory, RANKS, "hsdp", world_size=RANKS)
    assert [rank[:2] for rank in found] == [(digest, 2)] * RANKS
    for rank, (_, _, read) in enumerate(found):
        parts = {f"block_0000{one}/index.json" for one in (rank, (rank + 2) % RANKS)}
        assert {name for name in read if name.endswith("json")} - {"index.json"} == parts | {
            f"block_0000{one}/files.json" for one in (rank, (rank + 2) % RANKS)
        }


def test_other_number_of_ranks_reads_the_parts_that_overlap(sharded):
    directory, digest = sharded
    found = run_ranks(_load_and_note, directory, 3, world_size=3)
    assert [rank[:2] for rank in found] == [(digest, 2)] * 3
    first, middle, last = (read for _, _, read in found)
    assert "ranges.json" not in first | last  # the blocks of ranks 0 and 2 contain what these load now
    assert middle > {"ranges.json", "block_00000/index.json", "block_00001/index.json"}


def test_index_json_has_no_chunks_of_tensors_that_are_split_over_many_ranks(sharded):
    tensors = json.loads((sharded[0] / "step_00000002" / "index.json").read_bytes())["tensors"]
    assert tensors["models.0.body.0.weight"] == {"dtype": "float32", "shape": [13, 7], "chunks": []}
    assert len(tensors["tree"]["chunks"]) == 1
    assert not [key for key in tensors if key.startswith(OWN_KEYS)]


def test_older_hpcaccel_refuses_it(sharded, monkeypatch):
    directory, _ = sharded
    monkeypatch.setattr(manifest, "PARTS_VERSION", 1)
    with pytest.raises(CheckpointError, match="format version 2, written by a newer hpcaccel"):
        CheckpointEngine(directory).load(directory / "step_00000002", TrainingState())


def test_list_has_the_files_of_all_blocks(sharded):
    directory, _ = sharded
    [one] = list_checkpoints(directory / "step_00000002")
    assert one.problem is None
    assert set(one.manifest["files"]) == files_in(one.path) - {"COMMITTED"}
    assert not [key for key in one.to_json() if "block" in key]


def test_index_without_chunks_of_a_tensor_is_not_loaded(sharded, tmp_path):
    directory = shutil.copytree(sharded[0], tmp_path / "checkpoints")
    path = directory / "step_00000002"
    content = manifest.read_manifest(path)
    files = manifest.read_block(path, content, "block_00001")
    part = json.loads((path / "block_00001/index.json").read_bytes())
    part["tensors"]["models.0.body.0.weight"]["chunks"].pop()
    files["block_00001/index.json"] = _rewritten(path / "block_00001/index.json", part)
    content["blocks"]["block_00001"] = _rewritten(path / "block_00001/files.json", {"files": files})
    (path / "COMMITTED").write_bytes(manifest.seal(content))
    with pytest.raises(CheckpointError, match=r"does not have all chunks of models\.0\.body\.0\.weight"):
        CheckpointEngine(directory).load(path, Training("plain").state(), fall_back=False)


def _rewritten(file, content):
    text = json.dumps(content).encode()
    file.write_bytes(text)
    return {"bytes": len(text), "crc32": f"{zlib.crc32(text):08x}"}


# -- damage ------------------------------------------------------------------------------------------------------------

DAMAGED = [
    ("block_00001/index.json", False),
    ("block_00001/index.json", True),
    ("block_00001/files.json", False),
    ("block_00001/rank_00003.bin", True),
]


@pytest.mark.parametrize(("name", "missing"), DAMAGED)
def test_damaged_or_missing_file_of_a_block_is_found(sharded, tmp_path, name, missing):
    directory = shutil.copytree(sharded[0], tmp_path / "checkpoints")
    path = directory / "step_00000002"
    file = path / name
    file.unlink() if missing else flip(file, file.stat().st_size // 2)
    [problem] = verify(path).problems
    assert name in problem
    assert not verify(path).notes
    found = run_ranks(_load, directory, "fsdp", RANKS, world_size=RANKS)
    assert [step for _, step in found] == [1] * RANKS
    assert (directory / "quarantined_step_00000002").is_dir()
    assert verify(directory / "step_00000001").good


def test_checkpoint_without_a_file_of_a_block_does_not_count_for_retention(sharded, tmp_path):
    directory = shutil.copytree(sharded[0], tmp_path / "checkpoints")
    file = directory / "step_00000002" / "block_00001" / "rank_00003.bin"
    aside = file.rename(tmp_path / file.name)
    assert commit.retire(directory, keep=1, newest_step=2) == []
    aside.rename(file)
    [removed] = commit.retire(directory, keep=1, newest_step=2)
    assert removed.name == ".step_00000001.deleted.tmp"


def test_another_run_does_not_start_from_a_checkpoint_without_a_file_of_a_block(sharded, tmp_path):
    directory = shutil.copytree(sharded[0], tmp_path / "checkpoints")
    (directory / "step_00000002" / "block_00001" / "rank_00003.bin").unlink()
    assert CheckpointEngine(tmp_path / "other").find(directory) == directory / "step_00000001"


def test_damaged_table_of_ranges_is_found_by_the_ranks_that_need_it(sharded, tmp_path):
    directory = shutil.copytree(sharded[0], tmp_path / "checkpoints")
    flip(directory / "step_00000002" / "ranges.json", 20)
    assert "ranges.json" in verify(directory / "step_00000002").problems[0]
    assert run_ranks(_load, directory, "fsdp", 3, world_size=3)[0][1] == 1
