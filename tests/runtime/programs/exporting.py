"""Exports the weights of a sharded and of a replicated model from two ranks, and loads them again."""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from hpcaccel import Accelerator
from hpcaccel.errors import CheckpointError
from hpcaccel.runtime.checkpointing.mapped_load import load_checkpoint_in_model

folder = Path(sys.argv[1])


class Net(nn.Module):
    """Tied weights, a buffer, and sizes that are not divisible by two."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.body = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 7))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)))


def fresh(accelerator, seed):
    torch.manual_seed(seed)
    net = Net()
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    return accelerator.prepare(net), expected


def equal(state, expected):
    return list(state) == list(expected) and all(torch.equal(state[name], expected[name]) for name in expected)


def check(strategy):
    accelerator = Accelerator(strategy=strategy, cpu=True)
    place = folder / strategy
    place.mkdir(exist_ok=True)
    model, expected = fresh(accelerator, 1)
    is_main, unwrapped = accelerator.is_main_process, accelerator.unwrap_model(model)

    # All ranks call save; with DDP rank 0 may call it alone without waiting.
    accelerator.save({"model": unwrapped.state_dict(), "step": 3}, place / "all.pt")
    accelerator.save(unwrapped.state_dict(), place / "all.safetensors", safe_serialization=True)
    if strategy == "ddp" and is_main:
        accelerator.save(unwrapped.state_dict(), place / "alone.pt")
        accelerator.save_model(model, place / "alone")

    state = accelerator.get_state_dict(model)
    assert equal(state, expected) if is_main or strategy == "ddp" else state == {}, sorted(state)
    assert not is_main or state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert all(type(value) in (torch.Tensor, nn.Parameter) for value in state.values())
    assert strategy == "fsdp" or next(iter(accelerator.get_state_dict(model, unwrap=False))).startswith("module.")

    for safe in (True, False):
        where = place / f"safe-{safe}"
        accelerator.save_model(model, where, max_shard_size=400, safe_serialization=safe)
        accelerator.wait_for_everyone()
        many = sorted(path.name for path in where.iterdir())
        accelerator.wait_for_everyone()
        again, other = fresh(accelerator, 2)
        load_checkpoint_in_model(again, where, strict=True)
        assert not equal(other, expected)
        found = accelerator.get_state_dict(again)
        assert equal(found, expected) if found else not is_main
        accelerator.wait_for_everyone()  # with DDP rank 0 saves alone and would delete files that others still load
        accelerator.save_model(model, where, safe_serialization=safe)
        accelerator.wait_for_everyone()
        one = [path.name for path in where.iterdir()]
        print(json.dumps({"strategy": strategy, "safe": safe, "many": many, "one": one}))

    # With a sharded model, a failed save on rank 0 is an error on all ranks.
    (place / "file").touch()
    accelerator.wait_for_everyone()
    try:
        accelerator.save_model(model, place / "file" / "below")
        assert strategy == "ddp"
        assert not is_main
    except (CheckpointError, NotADirectoryError):
        assert is_main or strategy == "fsdp"
    accelerator.end_training()


for strategy in ("fsdp", "ddp"):
    check(strategy)
print(json.dumps({"done": True}))
