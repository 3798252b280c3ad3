"""Saved tensors of several sizes, and a record of the bytes that are read from their files."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hpcaccel.checkpoint import chunk_reading
from hpcaccel.checkpoint.dcp_storage import ShardWriter
from hpcaccel.checkpoint.stored_file import StoredFile
from tests.checkpoint.chunks import SIZES

FACTS = {"step": 1, "epoch": 0, "world_size": 1, "guarantee": "state-exact"}


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
    """The bytes that are read from the disk from now on: begin and end of each range."""
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
