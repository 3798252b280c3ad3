"""Two ranks: each evaluates its part of the data with a model whose weights are in one folder on disk.

Arguments: a directory to work in.
"""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hpcaccel import Accelerator, gather_object, init_empty_weights, load_checkpoint_and_dispatch
from hpcaccel.errors import RuntimeMisuse

where = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
whole = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
accelerator.save_model(whole, where / "saved")
accelerator.wait_for_everyone()
samples = torch.rand(7, 4)

with init_empty_weights():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
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
accelerator.save_state(where / "state")
accelerator.save_model(model, where / f"copy-{accelerator.num_processes}")
accelerator.end_training()
