"""Which bytes of a snapshot have changed, where a rank's file has them, and what the index says about it."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from hpcaccel.checkpoint.rank_file_writer import RankFileWriter
from hpcaccel.checkpoint.snapshot_memory import SnapshotMemory
from hpcaccel.checkpoint.unchanged_bytes import LEAST_BYTES, Base, KnownFile, Layout, StoredAt, base_file
from hpcaccel.checkpoint.written_file import PlannedChunk, WrittenFile, index_of
from hpcaccel.checkpoint_files import SavePaths
from hpcaccel.errors import CheckpointError

BASE = base_file("rank_00000.bin")


def test_base_file_has_a_name_of_its_own_beside_the_rank_s_file():
    assert BASE == "rank_00000.base.bin"


def write_two_saves(directory, memory):
    """Write the file of step 1, and that of step 2, of whose two chunks the first has not changed."""
    files = RankFileWriter(memoryview(bytearray(memory)), threading.Event())
    lengths = [2 * LEAST_BYTES, 4096]
    for step, base in ((1, None), (2, 1)):
        paths = SavePaths(directory, step, 0)
        paths.temporary.mkdir()
        order = {"lengths": lengths, "file": "rank_00000.bin", "base": base, "seconds": 0.0, "unchanged": [0]}
        written = files.write(order, paths)
        os.rename(paths.temporary, paths.final)
    return paths.final, written, memory[: sum(lengths)]


def test_unchanged_chunk_is_linked_and_the_rank_s_file_has_the_other(tmp_path):
    path, written, content = write_two_saves(tmp_path, random.Random(1).randbytes(1 << 18))
    assert (path / BASE).samefile(tmp_path / "step_00000001" / "rank_00000.bin")
    assert (path / "rank_00000.bin").read_bytes() == content[-4096:]
    assert written.linked_bytes == len(content)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV])
def test_everything_is_written_where_a_file_cannot_have_another_name(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    path, written, content = write_two_saves(tmp_path, random.Random(1).randbytes(1 << 18))
    assert os.listdir(path) == ["rank_00000.bin"]
    assert (path / "rank_00000.bin").read_bytes() == content
    assert (written.base, written.linked_bytes, written.bytes) == (None, 0, len(content))


def test_snapshot_finds_the_tensors_that_it_holds_already():
    memory = SnapshotMemory(1 << 22)
    tensors = [torch.arange(5.0), torch.zeros(0), torch.ones(400_000), torch.ones(3), torch.full((300_000,), 2.0)]
    lengths = [-(-one.numel() * 4 // 64) * 64 for one in tensors]
    assert memory.snapshot(tensors, lengths, compare=True) == []
    assert memory.snapshot(tensors, lengths, compare=True) == [0, 1, 2, 3, 4]
    tensors[2][-1], tensors[4][0] = 5, float("nan")
    assert memory.snapshot(tensors, lengths, compare=True) == [0, 1, 3]
    assert memory.snapshot(tensors, lengths, compare=True) == [0, 1, 2, 3, 4]
    tensors[0] = torch.arange(4.0)  # as long in the file, with padding where the last element was
    assert memory.snapshot(tensors, lengths, compare=True) == [1, 2, 3, 4]
    starts = list(accumulate(lengths, initial=0))
    for tensor, start, end in zip(tensors, starts, starts[1:], strict=False):
        raw = tensor.numpy().tobytes()
        assert bytes(memory.view[start:end]) == raw + bytes(end - start - len(raw))
    assert memory.snapshot(tensors, lengths) == []
    memory.forget()
    assert memory.snapshot(tensors, lengths, compare=True) == []


def test_gpu_tensor_that_has_changed_is_not_compared_again():
    memory = SnapshotMemory(1 << 20)
    tensor = torch.arange(100_000.0)
    memory.snapshot([tensor], [400_000])
    assert memory._equals_gpu(tensor, 0, 400_000)
    tensor[-1] = 0
    assert not memory._equals_gpu(tensor, 0, 400_000)
    tensor[-1] = 99_999
    assert not memory._equals_gpu(tensor, 0, 400_000)
    assert memory._equals_gpu(tensor, 0, 400_064)


@pytest.mark.parametrize("seed", range(20))
def test_file_has_every_chunk_at_its_offset_and_its_parts_are_all_of_it(seed):
    dice = random.Random(seed)
    lengths = [64 * dice.choice((0, 1, 3, 63, 64, 65, 1500, 2000)) for _ in range(dice.randrange(1, 30))]
    memory = dice.randbytes(sum(lengths) + 8192)
    in_base = [number for number, length in enumerate(lengths) if length >= LEAST_BYTES and dice.random() < 0.7]
    base = Base(BASE, KnownFile(0, 0, 0, 0), dict.fromkeys(in_base, StoredAt(BASE, 128, 7)))
    layout = Layout(lengths, base)
    file = bytearray(sum(lengths) + 8192 * len(lengths))
    for extent in layout.extents:
        assert extent.start % 4096 == extent.stop % 4096 == extent.offset % 4096 == 0
        file[extent.offset : extent.offset + extent.stop - extent.start] = memory[extent.start : extent.stop]
    del file[layout.size :]
    for number, (start, length) in enumerate(zip(accumulate(lengths, initial=0), lengths, strict=False)):
        if number not in in_base and length:
            offset = layout.offsets[number]
            assert file[offset : offset + length] == memory[start : start + length]
    assert b"".join(memory[part.start : part.start + part.length] for part in layout.parts()) == bytes(file)
    chunks = [part.chunk for part in layout.parts() if part.chunk is not None]
    assert chunks == [number for number, length in enumerate(lengths) if length and number not in in_base]


def test_index_says_where_each_chunk_is():
    shapes = (([0], [24]), ([24], [0]), ([24], [16]))
    chunks = [PlannedChunk("a", "float32", [40], at, shape, 4 * shape[0]) for at, shape in shapes]
    base = {"file": BASE, "bytes": 1000, "crc32": 9, "pieces": [0]}
    written = WrittenFile("rank_00000.bin", 64, 5, [1, 0, 2], [128, 0, 64], [512, 0, 0], base, chunks)
    attached = WrittenFile.of("other.bin", [7], [100])
    (tensor,) = json.loads(index_of([attached, written]))["tensors"].values()
    assert (tensor["dtype"], tensor["shape"]) == ("float32", [40])
    assert [tuple(one.values()) for one in tensor["chunks"]] == [
        ([0], [24], BASE, 512, 96, 128, "00000001"),
        ([24], [0], "rank_00000.bin", 0, 0, 0, "00000000"),
        ([24], [16], "rank_00000.bin", 0, 64, 64, "00000002"),
    ]
    with pytest.raises(CheckpointError, match="24 of the 40 elements of a were written"):
        index_of([replace(written, pieces=[1], lengths=[128], offsets=[512], chunks=chunks[:1])])
    assert written.table() == {
        "rank_00000.bin": {"bytes": 64, "crc32": "00000005"},
        BASE: {"bytes": 1000, "crc32": "00000009"},
    }
