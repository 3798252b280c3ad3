"""GRPO with TRL on sums of two numbers. The component ``vllm`` of job.yaml generates the completions.

All options of ``GRPOConfig`` are arguments. A completion whose last number is the sum gets the reward 1, any other one
that contains a number 0.1.
"""

import os
import re
from dataclasses import dataclass, field

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, TrlParser

from hpcaccel.integrations.transformers import HpcaccelCallback, newest_checkpoint


@dataclass
class Options:
    model: str = field(metadata={"help": "name or directory of the model to train"})


def sums():
    pairs = [(a, b) for a in range(100) for b in range(100)]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)} for a, b in pairs]
    )


def reward(completions, answer, **_):
    numbers = [re.findall(r"\d+", completion[0]["content"]) for completion in completions]
    return [
        1.0 if found and found[-1] == right else 0.1 if found else 0.0
        for found, right in zip(numbers, answer, strict=True)
    ]


options, args = TrlParser((Options, GRPOConfig)).parse_args_and_config()
args.use_vllm = True
args.vllm_mode = "server"
args.vllm_server_host = os.environ["HPCACCEL_NODES_VLLM"].split(",")[0]
trainer = GRPOTrainer(options.model, reward, args, train_dataset=sums(), callbacks=[HpcaccelCallback()])
trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))
trainer.save_model(f"{args.output_dir}/final")
