"""A model on a stand-in accelerator and in CPU memory: its results, its state dict, and what is cleared."""

import json
import os
import sys

import torch

sys.path.insert(0, f"{os.path.dirname(os.path.abspath(__file__))}/vendor")

import torch_npu  # noqa: F401
from cpu_tensors import CALLS

from hpcaccel.big_modeling import dispatch_model
from hpcaccel.hooks import remove_hook_from_submodules
from hpcaccel.utils import get_state_dict_offloaded_model


class Tied(torch.nn.Sequential):
    def __init__(self):
        super().__init__(*(torch.nn.Linear(8, 8) for _ in range(4)))
        self[1].weight = self[0].weight


model = Tied()
x = torch.randn(4, 8)
expected, weights = model(x).detach(), {name: one.clone() for name, one in model.state_dict().items()}
dispatch_model(model, {"0": 0, "1": 0, "2": "cpu", "3": 0})
cleared = [CALLS.count("empty_cache")]
before = dict(model.named_parameters(remove_duplicate=False))
with torch.no_grad():
    result = model(x)
state = get_state_dict_offloaded_model(model)
after = dict(model.named_parameters(remove_duplicate=False))
cleared.append(CALLS.count("empty_cache"))
remove_hook_from_submodules(model)
print(
    json.dumps(
        {
            "devices": [str(one.device) for one in before.values()],
            "right": torch.equal(result.cpu(), expected),
            "state": all(torch.equal(state[name], one) for name, one in weights.items())
            and state.keys() == weights.keys(),
            "state_on": sorted({str(one.device) for one in state.values()}),
            "state_tied": state["0.weight"].data_ptr() == state["1.weight"].data_ptr(),
            "kept": all(after[name] is one for name, one in before.items()),
            "tied": model[0].weight is model[1].weight,
            "cleared": cleared,
        }
    )
)
