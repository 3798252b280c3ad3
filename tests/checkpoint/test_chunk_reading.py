"""Reading of large chunks: in segments by several threads, into aligned memory."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

from hpcaccel.checkpoint import (
    CheckpointEngine,
    TrainingState,
    chunk_targets,
)
from hpcaccel.checkpoint.dcp_storage import ShardReader
from hpcaccel.checkpoint.huge_pages import huge_pages
from hpcaccel.checkpoint.stored_file import StoredFile
from tests.checkpoint.chunks import SIZES, empty_like, same
from tests.checkpoint.test_damage import flip
from tests.checkpoint.world import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_chunk_is_read_in_several_segments(tmp_path, tensors, reads):
    targets = empty_like(tensors)
    dcp.load(targets, storage_reader=ShardReader(tmp_path))
    assert same(targets, tensors)
    assert max(end - begin for begin, end in reads) <= 8192 < 4 * max(SIZES)


def test_flipped_bit_in_any_segment_is_detected(tmp_path, tensors):
    path = tmp_path / "rank_00000.bin"
    for at in range(0, path.stat().st_size, 1999):
        flip(path, at)
        with pytest.raises(dcp.CheckpointException, match="is damaged: the CRC of t"):
            dcp.load(empty_like(tensors), storage_reader=ShardReader(tmp_path))
        flip(path, at)


def test_memory_with_the_alignment_of_the_file_is_read_without_a_buffer(tmp_path, tensors, monkeypatch):
    reader = ShardReader(tmp_path)
    piece = next(piece for index, piece in reader.index.pieces.items() if index.fqn == "t6")
    target = torch.frombuffer(huge_pages(piece.length, remainder=piece.offset % 4096), dtype=torch.float32)
    direct, blocks = [], StoredFile.read_blocks

    def note(self, memory, offset, key):
        direct.append(len(memory))
        blocks(self, memory, offset, key)

    monkeypatch.setattr(StoredFile, "read_blocks", note)
    dcp.load({"t6": target}, storage_reader=reader)
    assert torch.equal(target, tensors["t6"])
    assert piece.length - 2 * 4096 < sum(direct) <= piece.length
    for at in (piece.offset, piece.offset + 50_000, piece.offset + piece.length - 1):
        flip(tmp_path / "rank_00000.bin", at)
        with pytest.raises(dcp.CheckpointException, match="is damaged: the CRC of t6"):
            dcp.load({"t6": target}, storage_reader=reader)
        flip(tmp_path / "rank_00000.bin", at)


def test_direct_reads_only_into_huge_pages(tmp_path, tensors, monkeypatch):
    reader = ShardReader(tmp_path)
    piece = next(piece for index, piece in reader.index.pieces.items() if index.fqn == "t6")
    memory = huge_pages(piece.length + 8192)[4096 + piece.offset % 4096 :][: piece.length]
    target = torch.frombuffer(memory, dtype=torch.float32)
    assert (target.data_ptr() - piece.offset) % 4096 == 0
    monkeypatch.setattr(StoredFile, "read_blocks", None)
    dcp.load({"t6": target}, storage_reader=reader)
    assert torch.equal(target, tensors["t6"])


def _resume(rank, directory, wrap):
    """Load into an optimizer without state, then into one with state. Returns the number of bytes that were read
    without a buffer, whether the values are the saved ones, and whether the second load kept the state's tensors."""
    chunk_targets.LEAST_ALIGNED_BYTES = 1
    direct, blocks = [0], StoredFile.read_blocks

    def note(self, memory, offset, key):
        direct[0] += len(memory)
        blocks(self, memory, offset, key)

    StoredFile.read_blocks = note
    model = torch.nn.Linear(64, 16384)  # chunks that are not read in a batch
    if wrap:
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    engine = CheckpointEngine(directory, rank=rank, world_size=2 if wrap else 1)
    path = engine.save(TrainingState([model], [optimizer]), step=1)

    def moments():
        return [optimizer.state[value]["exp_avg"] for value in model.parameters()]

    def local(tensor):
        return tensor.to_local() if wrap else tensor

    kept = [local(value).clone() for value in moments()]
    optimizer.state.clear()
    engine.load(path, TrainingState([model], [optimizer]), fall_back=False)
    equal = all(torch.equal(value, local(now)) for value, now in zip(kept, moments(), strict=True))
    before = [local(value).data_ptr() for value in moments()]
    optimizer.step()
    engine.load(path, TrainingState([model], [optimizer]), fall_back=False)
    equal &= all(torch.equal(value, local(now)) for value, now in zip(kept, moments(), strict=True))
    return direct[0], equal, before == [local(value).data_ptr() for value in moments()]


def test_new_optimizer_state_is_read_without_a_buffer_and_existing_state_in_place(tmp_path):
    alone = run_ranks(_resume, tmp_path / "plain", False, world_size=1)
    for found in (*alone, *run_ranks(_resume, tmp_path / "sharded", True)):
        direct, equal, in_place = found
        assert direct > 500_000
        assert equal
        assert in_place


def test_state_of_another_dtype_or_memory_shared_with_a_parameter_is_replaced(tmp_path):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    engine = CheckpointEngine(tmp_path)
    path = engine.save(TrainingState([model], [optimizer]), step=1)
    weight = optimizer.state[model.weight]["momentum_buffer"].clone()
    bias = optimizer.state[model.bias]["momentum_buffer"].clone()
    optimizer.state[model.weight]["momentum_buffer"] = model.weight.detach()
    optimizer.state[model.bias]["momentum_buffer"] = (half := bias.half())
    saved = model.weight.detach().clone()
    engine.load(path, TrainingState([model], [optimizer]))
    assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], weight)
    assert torch.equal(optimizer.state[model.bias]["momentum_buffer"], bias)
    assert torch.equal(model.weight, saved)
    assert half.dtype == torch.half


def test_tensor_that_is_not_in_host_memory_receives_the_bytes_in_steps(tmp_path, tensors, monkeypatch):
    make = chunk_targets._Copy.__init__

    def elsewhere(self, *args):
        make(self, *args)
        self._host = None

    monkeypatch.setattr(chunk_targets._Copy, "__init__", elsewhere)
    targets = empty_like(tensors)
    dcp.load(targets, storage_reader=ShardReader(tmp_path))
    assert same(targets, tensors)
