"""Two ranks: each evaluates its part of the data with a model whose weights are on disk.

Arguments: a directory to work in.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hpcaccel import Accelerator, disk_offload, gather_object, init_empty_weights, load_checkpoint_and_dispatch
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.utils import offload_state_dict

where = Path(sys.argv[1])


def fresh() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
whole = fresh()
accelerator.save_model(whole, where / "saved")
accelerator.wait_for_everyone()
samples = torch.rand(7, 4)

with init_empty_weights():
    model = fresh()
folder = where / f"offloaded-{accelerator.process_index}"
load_checkpoint_and_dispatch(model, where / "saved", {"0": "disk", "1": "cpu", "2": "disk"}, offload_folder=folder)
model = accelerator.prepare(model)
with torch.no_grad(), accelerator.split_between_processes(samples) as part:
    found = gather_object([(len(part), model(part), whole(part))])
assert [length for length, _, _ in found] == [4, 3]
assert all(torch.equal(ours, right) for _, ours, right in found)
assert model[0].weight.is_meta

again = accelerator.prepare(
    nn.Sequential(nn.Linear(4, 3)), device_map={"": "disk"}, offload_folder=where / f"again-{accelerator.process_index}"
)
assert again(samples).shape == (7, 3)
with pytest.raises(RuntimeMisuse, match="no device for bias"):
    accelerator.prepare(nn.Linear(2, 2), device_map={"weight": "cpu"})

# One folder for all ranks, which have different weights.
torch.manual_seed(1 + accelerator.process_index)
mine = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).eval()
right = mine(samples)
torch.save(mine.state_dict(), where / f"mine-{accelerator.process_index}.bin")


def copied() -> nn.Module:
    copy = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).eval()
    copy.load_state_dict(mine.state_dict())
    return copy


places = {"0": "cpu", "1": "disk"}
prepared = accelerator.prepare(copied(), device_map=places, offload_folder=where / "by-prepare")
offloaded = disk_offload(copied(), where / "by-disk-offload")
with init_empty_weights():
    empty = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).eval()
checkpoint = where / f"mine-{accelerator.process_index}.bin"
loaded = load_checkpoint_and_dispatch(empty, checkpoint, places, offload_folder=where / "by-loading")
accelerator.wait_for_everyone()
assert all(torch.equal(one(samples), right) for one in (prepared, offloaded, loaded))
for name in ("by-prepare", "by-disk-offload", "by-loading"):
    assert sorted(os.listdir(where / name)) == ["rank_0", "rank_1"]

# A folder that a single process has written before is for all ranks.
if accelerator.is_main_process:
    offload_state_dict(where / "ready", whole.state_dict())
accelerator.wait_for_everyone()
assert torch.equal(disk_offload(fresh(), where / "ready")(samples), whole(samples))
assert not any(name.startswith("rank_") for name in os.listdir(where / "ready"))
accelerator.save_state(where / "state")
accelerator.save_model(model, where / f"copy-{accelerator.num_processes}")
accelerator.end_training()
