"""Trains a tiny Llama with DeepSpeed's sequence parallelism on two ranks, and the same on one process before.

Arguments: the ZeRO stage, and ``apart`` if the loader is prepared apart from the model. Rank 0 prints both losses, and
the largest difference of a weight.
"""

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

from hpcaccel import Accelerator, DeepSpeedPlugin
from hpcaccel.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

WORDS, LENGTH, BATCH, STEPS, CLIP = 13, 16, 2, 4, 100.0
stage, apart = int(sys.argv[1]), "apart" in sys.argv
tokens = torch.randint(WORDS, (24, LENGTH), generator=torch.Generator().manual_seed(5))


def make_model():
    sys.modules.setdefault("torchvision", None)  # transformers would import it, and this model needs none
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings: dict[str, Any] = {**sizes, "vocab_size": WORDS, "num_key_value_heads": 2, "use_cache": False}
    config = LlamaConfig(**settings, attn_implementation="sdpa")  # type: ignore[call-arg]
    return LlamaForCausalLM(config)


def plain():
    """Before DeepSpeed replaces the attention of all models."""
    model = make_model()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.2), []
    for number in range(STEPS):
        rows = tokens[number * BATCH : (number + 1) * BATCH]
        targets = F.pad(rows, (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(model(input_ids=rows).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, dict(model.named_parameters())


expected, parameters = plain()
accelerator = Accelerator(
    cpu=True,
    deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage, gradient_clipping=CLIP),
    parallelism_config=ParallelismConfig(sp_size=2, sp_handler=DeepSpeedSequenceParallelConfig()),
)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
rows: Any = [{"input_ids": row, "position_ids": torch.arange(LENGTH), "labels": row} for row in tokens]
loader = DataLoader(rows, batch_size=BATCH)
if apart:
    loader = accelerator.prepare(loader)
    accelerator.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = BATCH
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.deepspeed_ulysses_dl_adapter(loader, model)
else:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for number, batch in enumerate(loader):
    if number == STEPS:
        break
    targets = batch["shift_labels"]
    assert targets.shape == (BATCH, LENGTH // 2)
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    labels = (targets != -100).sum()
    dist.all_reduce(labels)  # with more than one group: of the ranks that split the batch
    loss = loss / labels
    if stage == 3:
        loss = 2 * loss  # DeepSpeed averages the gradients over the ranks here, and adds them up with stages 1 and 2
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(accelerator.reduce(loss.detach(), "sum")) / (2 if stage == 3 else 1))
whole = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    furthest = max(float((whole[name].float() - value.detach()).abs().max()) for name, value in parameters.items())
    print(json.dumps({"losses": losses, "expected": expected, "weights": furthest}), flush=True)
accelerator.end_training()
