"""A script that calls torchtitan's Trainer on a small model; two lines are hpcaccel's.

torchtitan looks for GPUs only. The lines above its import make it take the CPU, give ``torch.cpu`` the functions that
it asks for a device's name and memory, and replace its Triton kernels for mixtures of experts. Its language models need
an attention that has no backward pass on the CPU, so the model is another one; the Trainer, its data loader and its
checkpoints are torchtitan's. Version 0.3.0 needs ``torch.distributed.set_timeout``, which torch 2.13 lacks.
"""

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

vars(torch._utils)["_get_available_device_type"] = lambda: "cpu"
vars(torch.cpu).update(
    current_device=lambda: 0,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
)
vars(torch.distributed)["set_timeout"] = torch.distributed.distributed_c10d._set_pg_timeout
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()

from datasets import Dataset  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.components.validate import Validator  # noqa: E402
from torchtitan.config import ConfigManager, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.configs import DebugConfig  # noqa: E402
from torchtitan.distributed.pipeline_parallel import pipeline_llm  # noqa: E402
from torchtitan.hf_datasets import DatasetConfig  # noqa: E402
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader  # noqa: E402
from torchtitan.models.common import Embedding, Linear  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from hpcaccel.integrations import torchtitan  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--kill", help="RANK:STEP: this rank sends itself SIGTERM in this step")
parser.add_argument("--main", action="store_true", help="run torchtitan's own main()")
options, rest = parser.parse_known_args()

WORDS, SIZE = 64, 16


def tiny() -> Trainer.Config:
    """The configuration that ``--config tiny`` names."""
    data = HuggingFaceTextDataLoader.Config(dataset="numbers")
    return TinyTrainer.Config(
        model_spec=ModelSpec("tiny", "tiny", TinyModel.Config(), parallelize, pipeline_llm, None, None),
        tokenizer=Letters.Config(),
        dataloader=data,
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=2, seq_len=16, steps=12, mixed_precision_param="float32"),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor", module_fqns_per_model_part=[["embedding"], ["output"]]
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=500),
        validator=Validator.Config(freq=3, steps=2, dataloader=data),
        debug=DebugConfig(seed=7, enable_structured_logging=False),
    )


class TinyTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def train_step(self, batches):
        time.sleep(options.pause)
        if options.kill == f"{os.environ['RANK']}:{self.step}":
            os.kill(os.getpid(), signal.SIGTERM)
        super().train_step(batches)

    def pp_forward_backward_step(self, **_):
        """torch 2.13 cannot run the microbatches of torchtitan 0.3.0. This returns what torchtitan's method returns on
        each rank, a loss or -1, and trains nothing."""
        return torch.tensor([3.0 if self.pp_has_last_stage else -1.0])


class TinyModel(BaseModel):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        layers: list = field(default_factory=list)

        def update_from_config(self, *, config, **_):
            pass

        def get_nparams_and_flops(self, model, seq_len):
            return sum(weights.numel() for weights in model.parameters()), 1

    def __init__(self, config):
        super().__init__()
        self.embedding = Embedding.Config(num_embeddings=WORDS, embedding_dim=SIZE).build()
        self.output = Linear.Config(in_features=SIZE, out_features=WORDS).build()

    def forward(self, x, positions=None):
        # A pipeline stage has one of the two layers.
        x = x if self.embedding is None else self.embedding(x)
        return x if self.output is None else self.output(x)


def parallelize(model, *, parallel_dims, **_):
    return fully_shard(model, mesh=parallel_dims.get_mesh("fsdp"))


class Letters(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path):
        super().__init__()

    def encode(self, text, **_):
        return [ord(letter) % WORDS for letter in text]

    def decode(self, tokens, **_):
        raise NotImplementedError

    def get_vocab_size(self):
        return WORDS


DATASETS["numbers"] = DatasetConfig(
    path="",
    loader=lambda path: Dataset.from_dict({"text": [str(number**5) * 2 for number in range(100, 300)]}),
    sample_processor=lambda sample: sample["text"],
)
words = ["--module", "__main__", "--config", "tiny", *rest]
print("training", flush=True)
if options.main:
    sys.argv[1:] = words
    torchtitan.main()
else:
    trainer = ConfigManager().parse_args(words).build()
    torchtitan.add_to(trainer)
    trainer.train()
    print(json.dumps({"step": trainer.step}), flush=True)
    trainer.close()
