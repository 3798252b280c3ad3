"""Train on a vendor's device: argv are the kind of device, the project directory and the precision.

The model has dropout and tied parameters, and the optimizer is created before ``prepare``. With the kind ``cpu`` the
training continues from a checkpoint in the project directory, on the CPU.
"""

import json
import os
import sys

import torch

_, kind, project, precision = sys.argv
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, f"{HERE}/vendor")
if kind == "npu":
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = os.environ.get("LOCAL_RANK", "0")
elif kind == "xla":
    sys.path.insert(0, f"{HERE}/vendor_xla")
    os.environ["PJRT_DEVICE"] = "TPU"

from cpu_tensors import CALLS, DeviceTensor  # noqa: E402

from hpcaccel import Accelerator  # noqa: E402
from hpcaccel.checkpoint import tree  # noqa: E402
from hpcaccel.utils import ProjectConfiguration, set_seed  # noqa: E402


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, x):
        return self.last(self.dropout(self.first(x)))


tree._TENSORS.add(DeviceTensor)  # tensors of a real device are plain tensors
accelerator = Accelerator(
    cpu=kind == "cpu",
    mixed_precision=precision,
    project_config=ProjectConfiguration(project),
    rng_types=["torch", kind] if kind != "cpu" else ["torch"],
)
set_seed(3)
data = torch.utils.data.TensorDataset(torch.randn(65, 8))
model = Tied()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
plain = accelerator.unwrap_model(model)
found = {
    "device": accelerator.device.type,
    "type": str(accelerator.distributed_type),
    "backend": accelerator.state.backend,
    "wrapped": type(model).__name__,
}


def train(steps):
    losses = []
    while len(losses) < steps:
        for (x,) in loader:
            assert x.device.type == kind
            loss = (model(x) - x).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            if len(losses) == steps:
                break
    return losses


if kind != "cpu":
    found["losses"] = train(20)
    accelerator.save_state(f"{project}/saved")
    found["after"] = train(4)
accelerator.load_state(f"{project}/saved")
found["loaded"] = [value.cpu().abs().sum().item() for value in plain.state_dict().values()]
found["again"] = train(4)
accelerator.wait_for_everyone()
accelerator.free_memory()
found["tied"] = plain.first.weight is plain.last.weight
found["on_device"] = all(parameter.device.type == kind for parameter in plain.parameters())
found["same"] = accelerator.gather(plain.first.weight.detach().sum()[None]).unique().numel() == 1
accelerator.save_model(plain, f"{project}/model")
if accelerator.is_main_process:
    print(
        json.dumps(
            found
            | {"calls": sorted(set(CALLS)), "synced": CALLS.count("sync"), "reduced": CALLS.count("reduce_gradients")}
        )
    )
accelerator.end_training()
