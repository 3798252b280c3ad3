"""Chunks that several ranks of a node need: each byte is read from the disk by one of them."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpcaccel.checkpoint import CheckpointEngine, TrainingState, node_sharing
from hpcaccel.checkpoint.dcp_storage import ShardReader
from hpcaccel.checkpoint.manifest_writer import Piece
from hpcaccel.checkpoint.node_sharing import WHOLE, Share, SharedRing, groups, offer, open_ring, open_rings
from hpcaccel.checkpoint.shard_files import BLOCK_BYTES
from hpcaccel.checkpoint.stored_file import StoredFile
from hpcaccel.errors import Damaged
from tests.checkpoint.chunks import empty_like, same
from tests.checkpoint.test_damage import flip
from tests.checkpoint.world import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def load_together(directory, shares, targets):
    """Load in one thread for each rank. Returns each rank's error, or None."""

    def load(share, target):
        reader = ShardReader(directory)
        reader._kinds = dict.fromkeys(target, WHOLE)
        reader.share({WHOLE: share})
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
    assert all(end <= begin + BLOCK_BYTES for (_, end), (begin, _) in pairwise(ordered))  # whole blocks are read
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


def test_ring_of_killed_ranks_is_removed_by_a_later_load(ring):
    now = time.time()
    for name, age in {"hpcaccel-load-old": 3600, "hpcaccel-load-in-use": 60, "other": 3600}.items():
        (ring / name).touch()
        os.utime(ring / name, (now, now - age))
    assert open_rings({}) == {}
    assert len(list(ring.iterdir())) == 3  # a rank that shares nothing does not look
    [new] = open_rings({WHOLE: Share("hpcaccel-load-new", 0, 2)}).values()
    new.close()
    assert {path.name for path in ring.iterdir()} == {"hpcaccel-load-in-use", "hpcaccel-load-new", "other"}


def pieces_of(kind, *offsets):
    return [(kind, Piece("rank_00000.bin", offset, 100, 128, 0)) for offset in offsets]


def test_only_ranks_of_one_node_with_the_same_chunks_share(ring, monkeypatch):
    pieces = pieces_of(WHOLE, 0, 128)
    here, less = offer(pieces), offer(pieces[:1])
    assert here == offer(reversed(pieces)) != less
    shares = groups([here, less, None, here, ("another node", here[1]), here])
    positions = [{kind: (share.position, share.ranks) for kind, share in found.items()} for found in shares]
    assert positions == [{WHOLE: (0, 3)}, {}, {}, {WHOLE: (1, 3)}, {}, {WHOLE: (2, 3)}]
    assert len({share.name for found in shares for share in found.values()}) == 1
    monkeypatch.setattr(node_sharing, "available_bytes", lambda: node_sharing.RING_BYTES)
    assert offer(pieces) is None
    monkeypatch.setattr(node_sharing, "available_bytes", lambda: None)
    monkeypatch.setattr(node_sharing, "LEAST_BYTES", 1000)
    assert offer(pieces) is None
    monkeypatch.setattr(node_sharing, "LEAST_BYTES", 1)
    monkeypatch.setattr(node_sharing, "SHARED_MEMORY", ring / "missing")
    assert offer(pieces) is None


def test_rank_shares_each_kind_with_the_ranks_that_need_the_same_chunks_of_it(ring):
    common = pieces_of(WHOLE, 0)
    offers = [offer([*common, *pieces_of("shard", 1024 * part)]) for part in (1, 2, 1, 2)]
    shares = groups(offers)
    assert [(found[WHOLE].position, found["shard"].position) for found in shares] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert [found["shard"].name == shares[0]["shard"].name for found in shares] == [True, False, True, False]
    assert set(offer([pair for kind in "abcd" for pair in pieces_of(kind, 0)])[1]) == set("abc")


def count_reads():
    """From now on count the bytes that this process reads from the disk, and the segments that it gets from others."""
    read, shared = [0], [0]
    parts, blocks, find = StoredFile.parts, StoredFile.read_blocks, SharedRing.find

    def note_parts(self, offset, length, key):
        read[0] += length
        return parts(self, offset, length, key)

    def note_blocks(self, memory, offset, key):
        read[0] += len(memory)
        blocks(self, memory, offset, key)

    def found(self, number):
        shared[0] += 1
        return find(self, number)

    StoredFile.parts, StoredFile.read_blocks, SharedRing.find = note_parts, note_blocks, found
    return read, shared


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
    read, shared = count_reads()
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


def _build(shape, names):
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 1024, bias=False)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 512)).sum().backward()
    optimizer.step()
    return model, optimizer


def _save_sharded(rank, directory):
    model, optimizer = _build((2,), ("shard",))
    CheckpointEngine(directory, rank=rank, world_size=2).save(TrainingState([model], [optimizer]), step=1)
    return [full.clone() for full in _whole(model, optimizer)]


def _whole(model, optimizer):
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    return [value.detach().full_tensor() for value in [*model.parameters(), *moments]]


def _load_sharded(rank, directory, shape, names):
    node_sharing.LEAST_BYTES = 1
    model, optimizer = _build(shape, names)
    for value in [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]:
        value.detach().to_local().zero_()
    read, shared = count_reads()
    engine = CheckpointEngine(directory, rank=rank, world_size=4)
    engine.load(directory / "step_00000001", TrainingState([model], [optimizer]), fall_back=False)
    return _whole(model, optimizer), read[0], shared[0]


@pytest.mark.parametrize(("shape", "names"), [((2, 2), ("replicate", "shard")), ((4,), ("shard",))])
def test_replicas_and_ranks_that_divide_a_saved_shard_read_it_once_together(tmp_path, shape, names):
    saved = run_ranks(_save_sharded, tmp_path)[0]
    size = sum(path.stat().st_size for path in (tmp_path / "step_00000001").glob("rank_*.bin"))
    found = run_ranks(_load_sharded, tmp_path, shape, names, world_size=4)
    for tensors, _, shared in found:
        assert all(torch.equal(*pair) for pair in zip(saved, tensors, strict=True))
        assert shared
    assert sum(read for _, read, _ in found) < 1.1 * size
