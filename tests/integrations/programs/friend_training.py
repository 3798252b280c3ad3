"""One training with hpcaccel's Accelerator and PEFT, datasets, schedulefree and ``torch.compile``.

Four models learn side by side, each with a loss of its own. ``adapters`` and ``hooked`` have LoRA adapters of PEFT;
hooks save those of ``hooked`` without the frozen weights, as scripts of diffusers do. ``averaged`` has a schedule-free
optimizer, ``compiled`` is compiled. The batches come from a map-style dataset of the package datasets and from two of
its streams. Each step logs the losses and the numbers of the rows that the ranks have read.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import datasets
import peft
import schedulefree
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from hpcaccel import Accelerator
from hpcaccel.runtime.data import iterable

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="ddp")
parser.add_argument("--kill", help="RANK:STEP: this rank sends itself SIGTERM after this step")
options = parser.parse_args()

EPOCHS = 3
ROWS = 48
WORDS = 32


def language_model():
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def with_adapters():
    config = peft.LoraConfig(r=2, lora_dropout=0.2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(language_model(), config)


class NextWord(torch.nn.Module):
    """Small, because it is compiled: that takes long for a model of transformers."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(WORDS, 16)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, WORDS))

    def forward(self, words):
        scores = self.layers(self.table(words[:, :-1]))
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


def save_adapters(models, weights, folder):
    place = models.index(hooked)
    state = peft.get_peft_model_state_dict(accelerator.unwrap_model(hooked), accelerator.get_state_dict(hooked))
    accelerator.save(state, Path(folder) / "adapters.pt")
    del weights[place]


def load_adapters(models, folder):
    models.remove(hooked)
    peft.set_peft_model_state_dict(accelerator.unwrap_model(hooked), torch.load(Path(folder) / "adapters.pt"))


def loss_of(model, batch):
    return model(input_ids=batch["words"], labels=batch["words"]).loss


iterable.BOOKMARK_SECONDS = 0.0  # so that a resume begins at a stream's state, not at the epoch's first row
accelerator = Accelerator(strategy=options.strategy)
reads_all = Accelerator(strategy=options.strategy, dispatch_batches=False)  # its streams are read by every rank

rows = [{"number": row, "words": [row * factor % WORDS for factor in range(1, 9)]} for row in range(ROWS)]
table = datasets.Dataset.from_list(rows).with_format("torch")
stream = table.to_iterable_dataset(num_shards=8)
buffered = stream.shuffle(seed=3, buffer_size=16)
table = accelerator.prepare(DataLoader(table, batch_size=4, shuffle=True, num_workers=1))
stream = accelerator.prepare(DataLoader(stream, batch_size=4))
buffered = reads_all.prepare(DataLoader(buffered, batch_size=4))

adapters, hooked, averaged = with_adapters(), with_adapters(), language_model()
compiled = torch.compile(NextWord(), backend="eager")
adapters, hooked, averaged, compiled = accelerator.prepare(adapters, hooked, averaged, compiled)
learning = [weight for model in (adapters, hooked, compiled) for weight in model.parameters() if weight.requires_grad]
optimizer = accelerator.prepare(torch.optim.AdamW(learning, lr=1e-2))
free = accelerator.prepare(schedulefree.AdamWScheduleFree(averaged.parameters(), lr=1e-2, warmup_steps=4))
accelerator.register_save_state_pre_hook(save_adapters)
accelerator.register_load_state_pre_hook(load_adapters)

for epoch in accelerator.epochs(EPOCHS):
    for loader in (table, stream, buffered):
        loader.set_epoch(epoch)
    free.train()
    for first, second, third in zip(table, stream, buffered, strict=True):
        losses = {
            "adapters": loss_of(adapters, first),
            "averaged": loss_of(averaged, first),
            "hooked": loss_of(hooked, second),
            "compiled": compiled(third["words"]),
        }
        accelerator.backward(sum(losses.values()))
        optimizer.step()
        free.step()
        optimizer.zero_grad()
        free.zero_grad()
        read = {"table": first, "stream": second, "buffered": third}
        numbers = {name: accelerator.gather(batch["number"]).tolist() for name, batch in read.items()}
        accelerator.log(
            {name: accelerator.reduce(loss, "mean") for name, loss in losses.items()}
            | {f"{name}.{place}": row for name, found in numbers.items() for place, row in enumerate(found)}
        )
        if options.kill == f"{accelerator.process_index}:{accelerator.step}":
            os.kill(os.getpid(), signal.SIGTERM)
        accelerator.checkpoint()
    free.eval()
    averaged.eval()
    with torch.no_grad():
        accelerator.log({"evaluation": loss_of(averaged, first)})
    averaged.train()

accelerator.print(json.dumps({"step": accelerator.step, "names": sorted(accelerator.get_state_dict(compiled))}))
