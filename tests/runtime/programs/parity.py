"""Trains one model in many ways in sequence, and compares each with a plain loop on one process.

Arguments: names of the ways (see WAYS). Prints for each the largest relative difference of a weight.
"""

import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpcaccel import Accelerator
from hpcaccel.runtime.handlers import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
)
from hpcaccel.runtime.parallelism_config import ParallelismConfig

SAMPLES, LENGTH, WORDS, BATCH, EPOCHS = 48, 5, 11, 2, 2


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Token embedding and head share one weight, as in language models."""

    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tp_plan():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def plugin(**options):
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**options)}


WAYS = {
    "ddp": lambda: {},
    "ddp-accumulate": lambda: {"gradient_accumulation_steps": 3},
    "ddp-split": lambda: {"split_batches": True},
    "ddp-split-accumulate": lambda: {"split_batches": True, "gradient_accumulation_steps": 3},
    "ddp-static": lambda: {"kwargs_handlers": [DistributedDataParallelKwargs(static_graph=True, bucket_cap_mb=1)]},
    "ddp-deterministic-accumulate": lambda: {"deterministic": True, "gradient_accumulation_steps": 2},
    "ddp-compile": lambda: {"dynamo_backend": "aot_eager"},
    "fsdp": lambda: {"strategy": "fsdp"},
    "fsdp-accumulate": lambda: {"strategy": "fsdp", "gradient_accumulation_steps": 3},
    "fsdp-split": lambda: {"strategy": "fsdp", "split_batches": True},
    "fsdp-split-accumulate": lambda: {"strategy": "fsdp", "split_batches": True, "gradient_accumulation_steps": 3},
    "fsdp-keep": lambda: plugin(transformer_cls_names_to_wrap=["Block"], reshard_after_forward=False),
    "fsdp-size": lambda: plugin(min_num_params=500, activation_checkpointing=True),
    "fsdp-regional": lambda: {
        "strategy": "fsdp",
        "dynamo_plugin": TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True),
    },
    "hybrid": lambda: {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)},
    "hybrid-accumulate": lambda: {
        "parallelism_config": ParallelismConfig(dp_shard_size=2),
        "gradient_accumulation_steps": 3,
    },
    "tp": lambda: {"parallelism_config": ParallelismConfig(tp_size=2), "tp_plan": tp_plan()},
    "tp-fsdp": lambda: {
        "parallelism_config": ParallelismConfig(tp_size=2),
        "strategy": "fsdp",
        "tp_plan": tp_plan(),
        "gradient_accumulation_steps": 2,
    },
}


def data():
    tokens = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def loss_of(model, tokens, targets):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def plain(global_batch):
    """The weights after a loop without parallelism, with rank 0's seed and whole batches."""
    torch.manual_seed(100)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(EPOCHS):
        for tokens, targets in DataLoader(data(), batch_size=global_batch):
            optimizer.zero_grad()
            loss_of(model, tokens, targets).backward()
            optimizer.step()
    return model.state_dict()


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(options, batch):
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(100 + accelerator.process_index)  # as in scripts that seed per rank
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data(), batch_size=batch)
    optimizer, loader, model = accelerator.prepare(optimizer, loader, model)
    for _ in range(EPOCHS):
        for tokens, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, tokens, targets))
                optimizer.step()
                optimizer.zero_grad()
    unwrapped = accelerator.unwrap_model(model)
    assert type(unwrapped).__name__.endswith("Net"), type(unwrapped)
    assert unwrapped.head.weight is unwrapped.embedding.weight, "the tie is broken"
    weights = {key: full(value.detach()).clone() for key, value in unwrapped.state_dict().items()}
    data_size = accelerator._session.group.data_size
    accelerator.end_training()
    return weights, data_size


results = {}
for name in sys.argv[1:]:
    options = WAYS[name]()
    split = options.get("split_batches", False)
    weights, data_size = trained(options, BATCH * 4 if split else BATCH)
    steps = options.get("gradient_accumulation_steps", 1)
    expected = plain((BATCH * 4 if split else BATCH * data_size) * steps)
    assert weights.keys() == expected.keys()
    results[name] = max(
        float(((weights[key] - expected[key]) / expected[key].abs().clamp(min=1e-3)).abs().max()) for key in expected
    )
print(json.dumps(results), flush=True)
