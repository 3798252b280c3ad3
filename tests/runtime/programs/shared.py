"""Tensor parallelism: a meta model loaded by slices, clipping and fp16; each compared with the plain model.

Argument: a working directory.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from hpcaccel import Accelerator, init_empty_weights, load_sharded
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.handlers import GradScalerKwargs
from hpcaccel.runtime.parallelism_config import ParallelismConfig

where = Path(sys.argv[1])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


torch.manual_seed(1)
plain = Net().double()
x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2)).double()
plain(x).sum().backward()
norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)

results = {}
for strategy in ("ddp", "fsdp"):
    accelerator = Accelerator(cpu=True, strategy=strategy, parallelism_config=ParallelismConfig(tp_size=2))
    assert accelerator.torch_device_mesh["tp"].size() == 2
    if accelerator.is_main_process:
        from safetensors.torch import save_file

        where.mkdir(exist_ok=True)
        save_file(plain.state_dict(), where / "model.safetensors")
    accelerator.wait_for_everyone()
    with init_empty_weights():
        model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    load_sharded(model, where)
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), plain.state_dict()[name]), name
    accelerator.backward(model(x).sum())
    found = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    results[strategy] = float(full(found) - norm)
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(full(parameter.grad), other.grad, rtol=1e-10), name
    optimizer.step()
    accelerator.end_training()

accelerator = Accelerator(
    cpu=True,
    mixed_precision="fp16",
    tp_plan={"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()},
    parallelism_config=ParallelismConfig(tp_size=2),
    kwargs_handlers=[GradScalerKwargs(init_scale=64.0)],
)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
rounds: list[Any] = []
results["skipped"] = rounds
for overflows in (False, True):
    accelerator.backward(model(x.float()).sum())
    if overflows and accelerator.process_index == accelerator.num_processes - 1:
        model.blocks[0].up.weight.grad.to_local().fill_(float("inf"))  # only in this rank's shard
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    skipped = torch.tensor([int(accelerator.optimizer_step_was_skipped)])
    rounds.append(accelerator.gather(skipped).tolist())
accelerator.end_training()

for plan, said in (
    ({"blocks.*.middle": ColwiseParallel()}, "'blocks.*.middle' matches no module"),
    ({"x": 3}, "is neither a ParallelStyle"),
):
    accelerator = Accelerator(cpu=True, tp_plan=plan, parallelism_config=ParallelismConfig(tp_size=2))
    message = ""
    try:
        accelerator.prepare(Net())
    except RuntimeMisuse as error:
        message = str(error)
    assert said in message, message
    accelerator.end_training()
print(json.dumps(results), flush=True)
