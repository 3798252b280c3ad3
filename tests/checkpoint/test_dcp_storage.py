"""``ShardWriter`` and ``ShardReader`` as the storage of DCP's own ``save`` and ``load``."""

import errno
import os
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hpcaccel.checkpoint.dcp_storage import ShardReader, ShardWriter
from hpcaccel.checkpoint.shard_files import why_not_written
from hpcaccel.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

FACTS = {"step": 1, "epoch": 0, "world_size": 1, "guarantee": "state-exact"}


@pytest.mark.parametrize(
    ("number", "folder", "said"),
    [
        (errno.ENOSPC, "", r"No space left on device; it needs 5,000 bytes, [\d,]+ are free"),
        (errno.ENOSPC, "gone", "No space left on device; it needs 5,000 bytes"),
        (errno.EDQUOT, "", "Disk quota exceeded; it needs 5,000 bytes"),
        (errno.EIO, "", "Input/output error"),
    ],
)
def test_write_error_gives_the_free_bytes_only_on_a_full_disk(number, folder, said, tmp_path):
    error = OSError(number, os.strerror(number))
    assert re.fullmatch(said, why_not_written(error, tmp_path / folder, 5000))


def test_dcp_saves_and_loads_through_shard_writer_and_reader(tmp_path):
    state = {"model": {"weight": torch.randn(5, 3), "scale": torch.tensor(2.0)}, "list": [torch.arange(4)]}
    dcp.save(state, storage_writer=ShardWriter(tmp_path, rank=0, facts=FACTS))
    assert not (tmp_path / ".metadata").exists()
    target = {"model": {"weight": torch.zeros(5, 3), "scale": torch.zeros(())}, "list": [torch.zeros(4).long()]}
    dcp.load(target, storage_reader=ShardReader(tmp_path))
    assert torch.equal(target["model"]["weight"], state["model"]["weight"])
    assert target["model"]["scale"] == 2
    assert target["list"][0].tolist() == [0, 1, 2, 3]


def test_value_that_dcp_would_pickle_is_refused(tmp_path):
    with pytest.raises(dcp.CheckpointException, match="number is not a tensor") as caught:
        dcp.save({"number": 3}, storage_writer=ShardWriter(tmp_path, rank=0, facts=FACTS))
    assert any(isinstance(error, CheckpointError) for error, _ in caught.value.failures.values())
    assert not (tmp_path / "COMMITTED").exists()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0, 2), (7,), (3, 5)])
def test_tensor_of_every_dtype_and_shape_round_trips(tmp_path, dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    dcp.save({"x": tensor}, storage_writer=ShardWriter(tmp_path, rank=0, facts=FACTS))
    target = {"x": torch.empty_like(tensor)}
    dcp.load(target, storage_reader=ShardReader(tmp_path))
    assert torch.equal(target["x"], tensor)


def test_tensor_loads_into_a_non_contiguous_target(tmp_path):
    tensor = torch.arange(12.0).reshape(3, 4)
    dcp.save({"x": tensor}, storage_writer=ShardWriter(tmp_path, rank=0, facts=FACTS))
    target = {"x": torch.zeros(4, 3).T}
    dcp.load(target, storage_reader=ShardReader(tmp_path))
    assert torch.equal(target["x"], tensor)
