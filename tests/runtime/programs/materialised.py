"""Shards a model built on the meta device, loads it from safetensors, and trains it to the same weights as a plain one.

Arguments: a directory to work in.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from hpcaccel import Accelerator
from hpcaccel.errors import CheckpointError, RuntimeMisuse
from hpcaccel.runtime.checkpointing.sharded_load import load_sharded
from hpcaccel.runtime.handlers import FullyShardedDataParallelPlugin
from hpcaccel.runtime.parallel.meta_device import init_empty_weights

where = Path(sys.argv[1])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def step(model, optimizer, backward):
    out = model(torch.arange(6).reshape(2, 3))
    loss = nn.functional.cross_entropy(out.flatten(0, 1), torch.tensor([1, 2, 3, 4, 5, 6]))
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()


torch.manual_seed(5)
plain = Net().double()
for block in plain.blocks:
    block.count += 3
saved = {key: value.clone() for key, value in plain.state_dict().items()}

accelerator = Accelerator(cpu=True, strategy="fsdp")
if accelerator.is_main_process:
    from safetensors.torch import save_file

    where.mkdir(exist_ok=True)
    parts = {key: value for key, value in saved.items() if key != "head.weight"}  # tied to embedding.weight
    names = sorted(parts)
    half = len(names) // 2
    files = {"model-1.safetensors": names[:half], "model-2.safetensors": names[half:]}
    for file, members in files.items():
        save_file({name: parts[name] for name in members}, where / file)
    index = {"weight_map": {name: file for file, members in files.items() for name in members}}
    (where / "model.safetensors.index.json").write_text(json.dumps(index))
accelerator.wait_for_everyone()

# Built on meta, sharded, loaded.
with init_empty_weights():
    empty = Net().double()
assert all(parameter.is_meta for parameter in empty.parameters())
optimizer = torch.optim.AdamW(empty.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(empty, optimizer)
assert all(parameter.to_local().isnan().all() for parameter in model.parameters())
said = ""
try:
    model(torch.zeros(1, 1, dtype=torch.long))
except RuntimeMisuse as error:
    said = str(error)
assert "load_sharded" in said, said
model.reset_iter_state() if hasattr(model, "reset_iter_state") else None
model.reshard()
assert load_sharded(model, where) == ([], [])
for name, value in model.state_dict().items():
    assert torch.equal(full(value), saved[name]), name
assert model.head.weight is model.embedding.weight
stepping = torch.optim.AdamW(plain.parameters(), lr=1e-2)
for _ in range(3):
    step(model, optimizer, accelerator.backward)
    step(plain, stepping, lambda loss: loss.backward())
for name, value in model.state_dict().items():
    assert torch.allclose(full(value), plain.state_dict()[name], rtol=1e-10, atol=1e-12), name

# Buffers on meta too: the value of a buffer that is not saved is unknown.
accelerator.free_memory()
with init_empty_weights(include_buffers=True):
    lost = Net()
said = ""
try:
    accelerator.prepare(lost)
except RuntimeMisuse as error:
    said = str(error)
assert "not saved in checkpoints: scale" in said, said

# Only rank 0 has the values.
accelerator.free_memory()
torch.manual_seed(5)
if accelerator.is_main_process:
    mixed = Net().double()
else:
    with init_empty_weights():
        mixed = Net().double()
mixed = accelerator.prepare(mixed)
assert mixed.head.weight is mixed.embedding.weight
for name, parameter in mixed.named_parameters():
    assert torch.equal(full(parameter.detach()), saved[name]), name
accelerator.end_training()

# Every rank reads the names in the file, so all ranks raise the same error.
accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(reshard_after_forward=False))
other = accelerator.prepare(nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)))
said = ""
try:
    load_sharded(other, where)
except CheckpointError as error:
    said = str(error)
assert "missing from the checkpoint: 0.weight" in said, said
accelerator.end_training()
print(json.dumps({"passed": True}), flush=True)
