"""Sharded models that return objects of all kinds, compared with the plain model, and two that return functions. With
the argument ``tree_flatten`` torch finds tensors as its earlier releases do."""

import json
import sys
from collections import UserDict, deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_state
from torch.utils._pytree import tree_flatten

from hpcaccel import Accelerator
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.handlers import FullyShardedDataParallelPlugin

if sys.argv[1] == "tree_flatten":

    def register(state, output):
        for found in tree_flatten(output)[0] if torch.is_grad_enabled() else ():
            if torch.is_tensor(found) and found.requires_grad:
                found.register_hook(state._pre_backward)
        return output

    _fsdp_state.FSDPState._register_pre_backward_hook = register
    vars(_fsdp_state).pop("collect_grad_tensors", None)


class Plain:
    def __init__(self, loss):
        self.loss = loss


class Slotted:
    __slots__ = ("__dict__", "_loss", "unset")

    def __init__(self, loss):
        self._loss = loss

    @property
    def loss(self):
        return self._loss


@dataclass
class Data:
    inner: Any

    @property
    def loss(self):
        return self.inner.loss


@dataclass
class Result:
    loss: object


class Extended(dict):
    """Like an output of transformers, with an attribute that is not a key."""

    loss: Any


class Model(Plain):
    """An output that refers to its model and to itself."""

    def __init__(self, loss, model):
        super().__init__(loss)
        self.model, self.itself = model, self


def extended(loss):
    found = Extended(step=1)
    found.loss = loss
    return found


RETURNED = {
    "tensor": (lambda loss, model: loss, lambda out: out),
    "tuple": (lambda loss, model: (loss, None), lambda out: out[0]),
    "object": (lambda loss, model: Plain(loss), lambda out: out.loss),
    "slots": (lambda loss, model: Slotted(loss), lambda out: out.loss),
    "dataclass": (lambda loss, model: Result(loss), lambda out: out.loss),
    "subclass of dict": (lambda loss, model: Extended(loss=loss), lambda out: out["loss"]),
    "nested": (lambda loss, model: {"all": [Data(Plain(loss))]}, lambda out: out["all"][0].loss),
    "mapping": (lambda loss, model: UserDict(loss=loss), lambda out: out["loss"]),
    "deque": (lambda loss, model: deque([loss]), lambda out: out[0]),
    "attribute of a dict": (lambda loss, model: extended(loss), lambda out: out.loss),
    "with its model": (lambda loss, model: Model(loss, model), lambda out: out.loss),
}


class Block(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.up, self.down, self.wrap = nn.Linear(4, 8), nn.Linear(8, 4), wrap

    def forward(self, x):
        x = unwrapped(x)
        x = x + self.down(torch.tanh(self.up(x)))
        return Plain(x) if self.wrap == "object" else lambda: x


def unwrapped(x):
    return x() if callable(x) and not isinstance(x, torch.Tensor) else getattr(x, "loss", x)


class Net(nn.Module):
    def __init__(self, make, blocks):
        super().__init__()
        self.make = make
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(blocks) for _ in range(2 if blocks else 0)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.make(unwrapped(x).square().mean(), self)


def steps(model, optimizer, read, backward):
    for step in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).double()
        backward(read(model(x)))
        optimizer.step()
        optimizer.zero_grad()


def train(accelerator, make, read, *, blocks):
    """Train. Returns the largest difference from the plain model's parameters, and the smallest change of these."""
    torch.manual_seed(1)
    plain = Net(make, blocks).double()
    begin = [parameter.detach().clone() for parameter in plain.parameters()]
    torch.manual_seed(1)
    sharded = Net(make, blocks).double()
    model, optimizer = accelerator.prepare(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
    steps(model, optimizer, read, accelerator.backward)
    steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), read, lambda loss: loss.backward())
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    differences = [(a - b.full_tensor()).abs().max().item() for a, b in pairs]
    way = min((a - b).abs().max().item() for a, b in zip(plain.parameters(), begin, strict=True))
    accelerator.free_memory()
    return max(differences), way


results, refused = {}, []
for reshard in (True, False):
    plugin = FullyShardedDataParallelPlugin(reshard_after_forward=reshard)
    accelerator = Accelerator(cpu=True, strategy="fsdp", fsdp_plugin=plugin)
    for name, (make, read) in RETURNED.items():
        for blocks in ("", "object"):
            found = train(accelerator, make, read, blocks=blocks)
            results[f"{name}, reshard={reshard}, blocks={blocks or 'none'}"] = found
    try:
        # With reshard_after_forward blocks are freed after the forward pass, but a whole model is not.
        returned = (lambda loss, model: loss) if reshard else (lambda loss, model: lambda: loss)
        train(accelerator, returned, unwrapped, blocks="function" if reshard else "")
        refused.append("nothing was refused")
    except RuntimeMisuse as error:
        refused.append(str(error))
    accelerator.print(json.dumps({"results": results, "refused": refused}))
    accelerator.end_training()
