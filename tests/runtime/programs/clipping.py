"""Clips gradients that are whole, sharded in several ways, or both, and compares them with unsharded gradients."""

import json

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hpcaccel import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2)
rank, size = accelerator.process_index, accelerator.num_processes
mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("a",))
other = init_device_mesh("cpu", (1, size), mesh_dim_names=("b", "c"))


def gradient(number, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def with_gradient(whole, spread):
    """A parameter whose gradient is ``whole``, with the layout of ``spread``."""
    parameter = nn.Parameter(spread(torch.zeros_like(whole)))
    parameter.grad = spread(whole)
    return parameter


def partial(whole):
    return DTensor.from_local(whole / size, mesh, [Partial()])


WAYS = {
    "rows": lambda whole: distribute_tensor(whole, mesh, [Shard(0)]),
    "columns": lambda whole: distribute_tensor(whole, mesh, [Shard(1)]),
    "everywhere": lambda whole: distribute_tensor(whole, mesh, [Replicate()]),
    "another mesh": lambda whole: distribute_tensor(whole, other, [Replicate(), Shard(0)]),
    "plain": lambda whole: whole.clone(),
}
SHAPES = [(4, 6), (1, 3), (5, 2)]  # some ranks get no part of the second


def both(ways):
    wholes = [gradient(number, *SHAPES[number % 3]) for number in range(2 * len(ways))]
    reference = [with_gradient(whole, torch.clone) for whole in wholes]
    spread = [with_gradient(whole, WAYS[ways[number % len(ways)]]) for number, whole in enumerate(wholes)]
    return reference, spread


def same(reference, spread):
    for one, two in zip(reference, spread, strict=True):
        found = two.grad.full_tensor() if isinstance(two.grad, DTensor) else two.grad
        torch.testing.assert_close(found, one.grad)


for ways in ([way] for way in WAYS), (["rows", "plain"], ["rows", "columns", "everywhere"], list(WAYS)):
    for mix in ways:
        for order in (2.0, 1.0, 3, float("inf")):
            reference, spread = both(mix)
            expected = nn.utils.clip_grad_norm_(reference, 0.5, order)
            norm = accelerator.clip_grad_norm_(iter(spread), 0.5, norm_type=order)
            assert not isinstance(norm, DTensor)
            torch.testing.assert_close(norm, expected, check_dtype=False)
            same(reference, spread)
        reference, spread = both(mix)
        nn.utils.clip_grad_value_(reference, 0.3)
        accelerator.clip_grad_value_(spread, 0.3)
        same(reference, spread)

# a single tensor, some of the parameters, a gradient that is not summed over the ranks yet
reference, spread = both(list(WAYS))
nn.utils.clip_grad_norm_(reference[3], 0.1)
accelerator.clip_grad_norm_(spread[3], 0.1)
nn.utils.clip_grad_norm_(reference[:2], 0.1)
accelerator.clip_grad_norm_(spread[:2], 0.1)
same(reference, spread)
whole = gradient(1, 3, 2)
unsummed = nn.Parameter(partial(torch.zeros_like(whole)))
unsummed.grad = partial(whole)
torch.testing.assert_close(accelerator.clip_grad_norm_([unsummed], 1e9), whole.norm())
assert accelerator.clip_grad_norm_([], 1.0).item() == 0.0
assert accelerator.clip_grad_norm_([nn.Parameter(torch.zeros(1))], 1.0).item() == 0.0

# between boundaries gradients do not change, and the norm is returned
reference, spread = both(["rows", "plain"])
with accelerator.accumulate():
    assert not accelerator.sync_gradients
    norm = accelerator.clip_grad_norm_(spread, 0.01)
    accelerator.clip_grad_value_(spread, 0.01)
    torch.testing.assert_close(norm, nn.utils.get_total_norm([one.grad for one in reference]))
    same(reference, spread)

# a model that prepare() has sharded, and some of its parameters
accelerator.end_training()
torch.manual_seed(1)
plain = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
accelerator = Accelerator(strategy="fsdp")
model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()
model.load_state_dict(plain.state_dict())
model = accelerator.prepare(model)
x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
plain(x).square().sum().div(size).backward()
model(x).square().sum().div(size).backward()
for part in (slice(0, 2), slice(None)):
    expected = nn.utils.clip_grad_norm_(list(plain.parameters())[part], 0.1)
    norm = accelerator.clip_grad_norm_(list(model.parameters())[part], 0.1)
    torch.testing.assert_close(norm, expected)
same(list(plain.parameters()), list(model.parameters()))
accelerator.print(json.dumps({"done": True}))
