"""Saves or loads a sharded model and its optimizer with Accelerate's own functions.

Arguments: ``save`` or ``load``, and a directory.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from torch import nn

what, where = sys.argv[1], Path(sys.argv[2])


def build(plugin):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def content(model, optimizer):
    names = {id(one): name for name, one in model.named_parameters()}
    state = {
        f"{names[id(one)]}.{key}": full(value)
        for one, values in optimizer.state.items()
        for key, value in values.items()
    }
    return {"model": {key: full(value) for key, value in model.state_dict().items()}, "optimizer": state}


# Loading of full state dicts hangs in Accelerate 1.15 on CPUs, its own ones included.
for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT") if what == "save" else ("SHARDED_STATE_DICT",):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind, cpu_ram_efficient_loading=False)
    accelerator = Accelerator(cpu=True)
    # Accelerate selects FSDP on accelerators only; its FSDP2 works on CPUs, too.
    AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    assert accelerator.is_fsdp2
    folder = where / kind
    model, optimizer = build(plugin)
    if what == "save":
        for step in range(2):
            optimizer.zero_grad()
            torch.manual_seed(step)
            accelerator.backward(model(torch.randn(8, 5)).square().sum())
            optimizer.step()
        save_fsdp_model(plugin, accelerator, model, folder)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
        found = content(model, optimizer)
        assert hasattr(model[0].weight, "full_tensor")
        if accelerator.is_main_process:
            torch.save(found, folder / "expected.pt")
    else:
        load_fsdp_model(plugin, accelerator, model, folder)
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
        found, expected = content(model, optimizer), torch.load(folder / "expected.pt")
        for part in ("model", "optimizer"):
            assert found[part].keys() == expected[part].keys(), (found[part].keys(), expected[part].keys())
            for key, value in expected[part].items():
                assert torch.equal(found[part][key], value), (kind, key)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    AcceleratorState._reset_state()
