"""Saves a sharded model and its optimizer in Accelerate's files and loads them again; loads directories of Accelerate.

Arguments: a directory to work in, and a directory of ``accelerate_fsdp.py``, or nothing.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hpcaccel import Accelerator
from hpcaccel.checkpointing import load_accelerator_state, save_accelerator_state
from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.checkpointing.stored_state import flat
from hpcaccel.utils import (
    FullyShardedDataParallelPlugin,
    fsdp2_apply_ac,
    fsdp2_load_full_state_dict,
    fsdp2_prepare_model,
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)

where = Path(sys.argv[1])
theirs = Path(sys.argv[2]) if len(sys.argv) > 2 else None
FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


def build():
    torch.manual_seed(accelerator.process_index)  # other values than the saved ones, and other ones on each rank
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.5))


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def content(model, optimizer):
    names = {id(one): name for name, one in model.named_parameters()}
    state = {
        f"{names[id(one)]}.{key}": full(value).clone()
        for one, values in optimizer.state.items()
        for key, value in values.items()
    }
    return {"model": {key: full(value).clone() for key, value in model.state_dict().items()}, "optimizer": state}


def check(found, expected, what):
    for part in ("model", "optimizer"):
        assert found[part].keys() == expected[part].keys(), (what, found[part].keys(), expected[part].keys())
        for key, value in expected[part].items():
            assert torch.equal(found[part][key], value), (what, key)


def error_of(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("no error")


accelerator = Accelerator(cpu=True, strategy="fsdp")
model, optimizer = build()
optimizer.param_groups[0]["lr"] = 0.01
for step in range(2):
    optimizer.zero_grad()
    torch.manual_seed(step)
    accelerator.backward(model(torch.randn(8, 5)).square().sum())
    optimizer.step()
expected = content(model, optimizer)

# What was saved is loaded into a fresh model and optimizer, in each kind of files.
cases = {"dcp": (SHARDED, True), "full": (FULL, True), "ranks": (SHARDED, False)}
for name, (kind, use_dcp) in cases.items():
    plugin = FullyShardedDataParallelPlugin(state_dict_type=kind)
    folder = where / name
    for _ in range(2):  # the second save replaces the first one
        save_fsdp_model(plugin, accelerator, model, folder, use_dcp=use_dcp)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, use_dcp=use_dcp)
    fresh, stepper = build()
    assert load_fsdp_model(plugin, accelerator, fresh, folder, use_dcp=use_dcp) == ([], [])
    load_fsdp_optimizer(plugin, accelerator, stepper, fresh, folder, use_dcp=use_dcp)
    check(content(fresh, stepper), expected, name)
    assert stepper.param_groups[0]["lr"] == 0.01
    parameter = next(iter(stepper.state))
    assert stepper.state[parameter]["exp_avg"].placements == parameter.placements
    # The loaded training goes on like the saved one.
    twin, other = build()
    load_fsdp_model(plugin, accelerator, twin, folder, use_dcp=use_dcp)
    load_fsdp_optimizer(plugin, accelerator, other, twin, folder, use_dcp=use_dcp)
    for one, its in ((fresh, stepper), (twin, other)):
        torch.manual_seed(9)
        accelerator.backward(one(torch.randn(8, 5)).square().sum())
        its.step()
    check(content(twin, other), content(fresh, stepper), name)

# Errors name what differs, on all ranks.
other = nn.Linear(2, 2)
other, optimizer_of_other = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
plugin = FullyShardedDataParallelPlugin()
said = error_of(CheckpointError, lambda: load_fsdp_model(plugin, accelerator, other, where / "dcp"))
assert "has no weights for weight" in said, said
said = error_of(
    CheckpointError, lambda: load_fsdp_optimizer(plugin, accelerator, optimizer_of_other, other, where / "dcp")
)
assert "parameter group 0 contains 0.bias" in said, said
said = error_of(CheckpointError, lambda: load_fsdp_model(plugin, accelerator, model, where / "nothing"))
assert "nothing/pytorch_model_fsdp_0 does not exist" in said, said
local = FullyShardedDataParallelPlugin(state_dict_type="LOCAL_STATE_DICT")
assert "LOCAL_STATE_DICT" in error_of(RuntimeMisuse, lambda: save_fsdp_model(local, accelerator, model, where / "no"))


# If one rank cannot write, all ranks raise the error.
class FailingWriter(dcp.FileSystemWriter):
    def write_data(self, *arguments):
        if accelerator.process_index == 1:
            raise OSError("the disk is full")
        return super().write_data(*arguments)


with mock.patch.object(dcp, "FileSystemWriter", FailingWriter):
    said = error_of(CheckpointError, lambda: save_fsdp_optimizer(plugin, accelerator, optimizer, model, where / "bad"))
    assert "optimizer_0 cannot be written: rank 1: the disk is full" in said, said
said = error_of(CheckpointError, lambda: load_fsdp_optimizer(plugin, accelerator, optimizer, model, where / "bad"))
assert "it has no .metadata" in said, said
real_save = torch.save
fails = mock.Mock(side_effect=OSError("the disk is full") if accelerator.process_index == 1 else real_save)
with mock.patch.object(torch, "save", fails):
    said = error_of(
        CheckpointError,
        lambda: save_fsdp_optimizer(plugin, accelerator, optimizer, model, where / "bad", use_dcp=False),
    )
    assert "the disk is full (rank 1" in said, said

# Accelerate's files of a training that is not sharded.
for ended in (10, 20):
    states = [{"weight": torch.full((2,), float(ended))}]
    save_accelerator_state(where / "whole", states, [], [], [], accelerator.process_index, ended)
accelerator.wait_for_everyone()
target = nn.ParameterDict({"weight": torch.zeros(2)})
assert load_accelerator_state(where / "whole", [target], [], [], [], accelerator.process_index) == {"step": 20}
assert target["weight"].tolist() == [20.0, 20.0]
accelerator.wait_for_everyone()

# One file of all shards.
merge_fsdp_weights(where / "dcp" / "pytorch_model_fsdp_0", where / "merged")
merge_fsdp_weights(where / "dcp" / "pytorch_model_fsdp_0", where / "merged", safe_serialization=False)
if accelerator.is_main_process:
    from safetensors.torch import load_file

    for merged in (load_file(where / "merged/model.safetensors"), torch.load(where / "merged/pytorch_model.bin")):
        assert merged.keys() == expected["model"].keys()
        assert all(torch.equal(merged[key], value) for key, value in expected["model"].items())

# Accelerate's own directories.
for kind in (SHARDED, FULL) if theirs else ():
    plugin = FullyShardedDataParallelPlugin(state_dict_type=kind)
    fresh, stepper = build()
    load_fsdp_model(plugin, accelerator, fresh, theirs / kind)
    load_fsdp_optimizer(plugin, accelerator, stepper, fresh, theirs / kind)
    its = torch.load(theirs / kind / "expected.pt")
    check(content(fresh, stepper), its, f"Accelerate's {kind}")
    save_fsdp_model(plugin, accelerator, fresh, where / "ours" / kind)
    save_fsdp_optimizer(plugin, accelerator, stepper, fresh, where / "ours" / kind)
    if accelerator.is_main_process:
        torch.save(its, where / "ours" / kind / "expected.pt")
        for name in ("pytorch_model_fsdp.bin", "optimizer.bin") if kind == FULL else ():
            ours, original = (flat(torch.load(at / kind / name)) for at in (where / "ours", theirs))
            assert ours.keys() == original.keys(), (name, ours.keys() ^ original.keys())
            assert all(torch.equal(ours[way], value) if torch.is_tensor(value) else ours[way] == value
                       for way, value in original.items()), name  # fmt: skip
if theirs:
    merge_fsdp_weights(theirs / SHARDED / "pytorch_model_fsdp_0", where / "of_theirs", remove_checkpoint_dir=True)
    assert not (theirs / SHARDED / "pytorch_model_fsdp_0").exists()
    if accelerator.is_main_process:
        merged, its = load_file(where / "of_theirs/model.safetensors"), torch.load(theirs / SHARDED / "expected.pt")
        assert merged.keys() == its["model"].keys()
        assert all(torch.equal(merged[key], value) for key, value in its["model"].items())

# Rank 0's whole state dict is spread over a model that was sharded without ``prepare``.
torch.manual_seed(accelerator.process_index)
with torch.device("meta"):
    alone = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
assert fsdp2_prepare_model(accelerator, alone) is alone
assert fsdp2_prepare_model(accelerator, alone) is alone
whole = {name: torch.arange(float(one.numel())).reshape(one.shape) for name, one in alone.state_dict().items()}
given = whole if accelerator.is_main_process else {}
assert fsdp2_load_full_state_dict(accelerator, alone, given) is alone
for name, value in alone.state_dict().items():
    assert torch.equal(full(value), whole[name]), name
alone(torch.zeros(1, 5))
alone.reshard()
said = error_of(CheckpointError, lambda: fsdp2_load_full_state_dict(accelerator, alone, alone.state_dict()))
assert "contains shards: pass accelerator.get_state_dict" in said, said
said = error_of(CheckpointError, lambda: fsdp2_load_full_state_dict(accelerator, alone, {}))
assert "lacks 0.weight" in said, said

# Tied parameters remain tied, and a block recomputes its forward.
calls = []


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        calls.append(x.shape)
        return torch.tanh(self.inner(x))


def tied():
    torch.manual_seed(accelerator.process_index)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Sequential(Block(), Block()), nn.Linear(4, 6, bias=False))
    model[2].weight = model[0].weight
    return model


raw = tied()
assert fsdp2_apply_ac(accelerator, raw) is raw
first, stepper = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.1, momentum=0.9))
accelerator.backward(first(torch.arange(3)).sum())
assert len(calls) == 4, calls  # two blocks, each twice
stepper.step()
second = tied()
second, other = accelerator.prepare(second, torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9))
for kind in (SHARDED, FULL):
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_state_dict_type(kind)
    folder = where / "tied" / kind
    save_fsdp_model(plugin, accelerator, first, folder)
    save_fsdp_optimizer(plugin, accelerator, stepper, first, folder)
    load_fsdp_model(plugin, accelerator, second, folder)
    load_fsdp_optimizer(plugin, accelerator, other, second, folder)
    check(content(second, other), content(first, stepper), f"tied, {kind}")
    assert second[2].weight is second[0].weight
accelerator.end_training()
print(json.dumps({"passed": True}), flush=True)
