"""Context parallelism: trains a tiny model for some steps, and compares it with a plain loop on one process.

Argument: JSON with ``sizes`` of the ParallelismConfig, and ``model``, ``strategy``, ``length``, ``save`` or ``load`` (a
directory), ``bf16``. Rank 0 prints its losses and the largest differences.
"""

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from hpcaccel import Accelerator
from hpcaccel.utils import ParallelismConfig, TorchContextParallelConfig

WORDS, STEPS, BATCH = 13, 3, 2
how = {"sizes": {}, "model": "own", "length": 16, **json.loads(sys.argv[1])}
LENGTH = how["length"]


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention, self.norm, self.up = Attention(width, 2), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + torch.tanh(self.up(x))


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids, position_ids):
        x = self.words(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model():
    torch.manual_seed(3)
    if how["model"] == "own":
        return Net()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings: dict[str, Any] = {**sizes, "vocab_size": WORDS, "num_key_value_heads": 2, "use_cache": False}
    config = LlamaConfig(**settings, attn_implementation="sdpa")  # type: ignore[call-arg]
    return LlamaForCausalLM(config)


def samples():
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(WORDS, (STEPS * BATCH * 4, LENGTH), generator=generator)
    places = torch.arange(LENGTH)
    return [{"input_ids": row, "position_ids": places, "labels": row} for row in tokens]


def loss_of(model, batch):
    """As in Accelerate's guide: labels are shifted before sequences are divided."""
    if how["model"] == "own":
        logits = model(batch["input_ids"], batch["position_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
    names = ("input_ids", "shift_labels", "labels")
    more = {"attention_mask": torch.ones_like(batch["input_ids"])} if how.get("mask") else {}
    return model(**{name: batch[name] for name in names}, **more).loss


def shifted(batch):
    return batch | {"shift_labels": F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()}


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def plain(ranks):
    """Losses and parameters of one process that sees the batches of all ranks together."""
    model = make_model()
    optimizer, losses = optimizer_of(model), []
    for number, batch in enumerate(DataLoader(samples(), batch_size=BATCH * ranks)):
        if number == STEPS:
            break
        batch = shifted(batch)
        if how["model"] == "own":
            batch["shift_labels"][:, -1] = 0  # so that each part of a sequence has as many labels as any other
        # The mean over equal parts of the sequences, as the ranks compute it.
        loss = loss_of(model, batch) if how["model"] == "own" else mean_of_parts(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, dict(model.named_parameters())


def mean_of_parts(model, batch):
    from hpcaccel.runtime.parallel.split_attention import positions

    size = how["sizes"].get("cp_size", 1)
    logits = model(input_ids=batch["input_ids"]).logits
    parts = positions(LENGTH, size)
    every = [F.cross_entropy(logits[:, own].flatten(0, 1), batch["shift_labels"][:, own].flatten()) for own in parts]
    return torch.stack(every).mean()


handler = TorchContextParallelConfig(cp_comm_strategy="alltoall")
config = ParallelismConfig(**how["sizes"], cp_handler=handler if how["sizes"].get("cp_size", 1) > 1 else None)
given = {"strategy": how["strategy"]} if "strategy" in how else {}
accelerator = Accelerator(cpu=True, parallelism_config=config, project_dir=how.get("save") or how.get("load"), **given)
model = make_model()
model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), DataLoader(samples(), batch_size=BATCH))
layout = accelerator._session.layout
losses, tokens = [], []
done = 0
if "load" in how:
    accelerator.load_state()
    done = accelerator.step
for batch in loader:
    if done == STEPS:
        break
    batch = shifted(batch)
    if how["model"] == "own":
        batch["shift_labels"][:, -1] = 0
    tokens.append(batch["input_ids"].clone())
    names = ("input_ids", "position_ids", "labels", "shift_labels")
    buffers = [batch[name] for name in names]
    with accelerator.maybe_context_parallel(
        buffers=buffers, buffer_seq_dims=[1] * 4, no_restore_buffers={batch["shift_labels"]}
    ):
        assert batch["input_ids"].shape == (BATCH, LENGTH // layout.context)
        loss = loss_of(model, batch)
        accelerator.backward(loss)
    assert torch.equal(batch["input_ids"], tokens[-1])
    assert batch["shift_labels"].shape == (BATCH, LENGTH // layout.context)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    done += 1
    if done == 2 and "save" in how:
        accelerator.save_state()
whole = accelerator.get_state_dict(model)
expected, parameters = plain(layout.data)
mine = torch.stack(tokens).flatten()
every = accelerator.gather(mine.unsqueeze(0))
shards = {type(parameter).__name__ for parameter in model.parameters()}
if accelerator.is_main_process:
    found = {
        "losses": losses,
        "expected": expected[-len(losses) :],
        "weights": max(float((whole[name].cpu() - value).abs().max()) for name, value in parameters.items()),
        "layout": layout._asdict(),
        "shards": sorted(shards),
        "distinct_batches": len({tuple(row.tolist()) for row in every}),
        "type": str(accelerator.distributed_type),
    }
    print(json.dumps(found), flush=True)
accelerator.wait_for_everyone()
ranks = torch.tensor([[accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank]])
assert accelerator.context_parallel_rank == accelerator.process_index // layout.tensor % layout.context
accelerator.end_training()
