"""Reading of large chunks: in segments by several threads, into aligned memory, shared by the ranks of a node."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpcaccel.checkpoint import (
    CheckpointEngine,
    TrainingState,
    chunk_reading,
    chunk_targets,
    node_sharing,
)
from hpcaccel.checkpoint.dcp_storage import ShardReader, ShardWriter
from hpcaccel.checkpoint.manifest_writer import Piece
from hpcaccel.checkpoint.node_sharing import Share, SharedRing, groups, offer, open_ring
from hpcaccel.checkpoint.stored_file import StoredFile, huge_pages
from hpcaccel.errors import Damaged
from tests.checkpoint.test_damage import flip
from tests.checkpoint.world import run_ranks

FACTS = {"step": 1, "epoch": 0, "world_size": 1, "guarantee": "state-exact"}
SIZES = (3, 9001, 17, 2048, 40, 1, 30000)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def tensors(tmp_path, monkeypatch):
    """Saved tensors; they are read in segments of a few blocks, so that small tensors have several."""
    monkeypatch.setattr(chunk_reading, "SEGMENT_BYTES", 8192)
    monkeypatch.setattr(chunk_reading, "BATCH_BYTES", 4096)
    found = {f"t{number}": torch.randn(size) for number, size in enumerate(SIZES)}
    dcp.save(found, storage_writer=ShardWriter(tmp_path, rank=0, facts=FACTS))
    return found


@pytest.fixture
def reads(monkeypatch):
    """The bytes that are read from the disk: begin and end of each range."""
    found = []
    parts, blocks = StoredFile.parts, StoredFile.read_blocks

    def note_parts(self, offset, length, key):
        found.append((offset, offset + length))
        return parts(self, offset, length, key)

    def note_blocks(self, memory, offset, key):
        found.append((offset, offset + len(memory)))
        blocks(self, memory, offset, key)

    monkeypatch.setattr(StoredFile, "parts", note_parts)
    monkeypatch.setattr(StoredFile, "read_blocks", note_blocks)
    return found


def empty_like(tensors):
    return {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}


def same(targets, tensors):
    return all(torch.equal(targets[key], tensors[key]) for key in tensors)


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


# -- shared by the ranks of a node


def load_together(directory, shares, targets):
    """Load in one thread for each rank. Returns each rank's error, or None."""

    def load(share, target):
        reader = ShardReader(directory)
        reader._common = set(target)
        reader.share(share)
        try:
            dcp.load(target, storage_reader=reader)
        except dcp.CheckpointException as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(shares)) as ranks:
        return list(ranks.map(load, shares, targets))


@pytest.fixture
def ring(tmp_path, monkeypatch):
    """Rings of small slots, in a directory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(node_sharing, "SHARED_MEMORY", folder)
    monkeypatch.setattr(node_sharing, "RING_BYTES", 3 * 4 * 8192)
    monkeypatch.setattr(node_sharing, "LEAST_BYTES", 1)
    return folder


@pytest.mark.parametrize("count", [2, 3])
def test_each_byte_is_read_by_one_rank_of_the_node(tmp_path, tensors, reads, ring, count):
    targets = [empty_like(tensors) for _ in range(count)]
    assert load_together(tmp_path, [Share("ring", rank, count) for rank in range(count)], targets) == [None] * count
    assert all(same(target, tensors) for target in targets)
    ordered = sorted(reads)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ordered))
    assert list(ring.iterdir()) == []


def test_damage_is_found_by_all_ranks_that_share(tmp_path, tensors, ring):
    flip(tmp_path / "rank_00000.bin", 60_000)
    errors = load_together(tmp_path, [Share("ring", rank, 2) for rank in range(2)], [empty_like(tensors)] * 2)
    assert all("is damaged: the CRC of t6" in error for error in errors)


def test_rank_reads_alone_if_the_others_do_not_come(tmp_path, tensors, ring, monkeypatch):
    monkeypatch.setattr(node_sharing, "PATIENCE_SECONDS", 0.1)
    target = empty_like(tensors)
    assert load_together(tmp_path, [Share("ring", 1, 2)], [target]) == [None]
    assert same(target, tensors)


def test_segment_with_wrong_bytes_in_the_ring_is_read_again(tmp_path, tensors, ring, monkeypatch):
    publish = SharedRing.publish
    monkeypatch.setattr(SharedRing, "publish", lambda self, number, crc: publish(self, number, crc ^ 1))
    targets = [empty_like(tensors) for _ in range(2)]
    assert load_together(tmp_path, [Share("ring", rank, 2) for rank in range(2)], targets) == [None, None]
    assert all(same(target, tensors) for target in targets)


def test_ranks_read_alone_without_memory_for_a_ring(tmp_path, tensors, ring, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert open_ring(Share("ring", 0, 2)) is None
    assert list(ring.iterdir()) == []


def test_only_ranks_of_one_node_with_the_same_chunks_share(ring, monkeypatch):
    pieces = [Piece("rank_00000.bin", offset, 100, 128, 0) for offset in (0, 128)]
    here, less = offer(pieces), offer(pieces[:1])
    assert here == offer(reversed(pieces)) != less
    shares = groups([here, less, None, here, ("another node", here[1]), here])
    assert [share and (share.position, share.ranks) for share in shares] == [(0, 3), None, None, (1, 3), None, (2, 3)]
    assert len({share.name for share in shares if share}) == 1
    monkeypatch.setattr(node_sharing, "available_bytes", lambda: node_sharing.RING_BYTES)
    assert offer(pieces) is None
    monkeypatch.setattr(node_sharing, "available_bytes", lambda: None)
    monkeypatch.setattr(node_sharing, "LEAST_BYTES", 1000)
    assert offer(pieces) is None
    monkeypatch.setattr(node_sharing, "LEAST_BYTES", 1)
    monkeypatch.setattr(node_sharing, "SHARED_MEMORY", ring / "missing")
    assert offer(pieces) is None


def _load_ddp(rank, directory):
    node_sharing.LEAST_BYTES = 1
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(700, 900))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 700)).sum().backward()
    optimizer.step()
    engine = CheckpointEngine(directory, rank=rank, world_size=2)
    path = engine.save(TrainingState([model], [optimizer]), step=1)
    kept = [value.clone() for value in model.parameters()]
    moments = [value["exp_avg"].clone() for value in optimizer.state.values()]
    for value in [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]:
        value.detach().zero_()
    read, shared, parts, find = [0], [0], StoredFile.parts, SharedRing.find

    def note(self, offset, length, key):
        read[0] += length
        return parts(self, offset, length, key)

    def found(self, number):
        shared[0] += 1
        return find(self, number)

    StoredFile.parts, SharedRing.find = note, found
    if rank == 0 and directory.name == "damaged":
        flip(next(path.glob("rank_0000*.bin")), 5000)
    try:
        engine.load(path, TrainingState([model], [optimizer]), fall_back=False)
    except Damaged as error:
        return str(error)
    equal = all(torch.equal(*pair) for pair in zip(kept, model.parameters(), strict=True))
    states = [state["exp_avg"] for state in optimizer.state.values()]
    return equal and all(torch.equal(*pair) for pair in zip(moments, states, strict=True)), read[0], shared[0]


def test_ddp_ranks_read_each_byte_once_together(tmp_path):
    first, second = run_ranks(_load_ddp, tmp_path / "good")
    size = sum(path.stat().st_size for path in (tmp_path / "good/step_00000001").glob("rank_*.bin"))
    assert first[0]
    assert second[0]
    assert first[2] + second[2] > 0
    assert first[1] + second[1] < 1.1 * size
    messages = run_ranks(_load_ddp, tmp_path / "damaged")
    assert messages[0] == messages[1]
    assert "is damaged" in messages[0]
