"""A script that calls TRL's SFTTrainer on a small random model, whole or with LoRA; two lines are hpcaccel's."""

import argparse
import json
import os
import signal

import datasets
import peft
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from hpcaccel.integrations.transformers import HpcaccelCallback, newest_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--lora", action="store_true")
parser.add_argument("--kill", help="RANK:STEP: this rank sends itself SIGTERM in this step")
options = parser.parse_args()

WORDS = ["<unk>", "<pad>", "<eos>", "the", "a", "dog", "cat", "bird", "fish", "eats", "sees", "likes"]


class Kill(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if options.kill == f"{os.environ['RANK']}:{state.global_step + 1}":
            os.kill(os.getpid(), signal.SIGTERM)


def sentence(number):
    nouns, verbs = WORDS[5:9], WORDS[9:12]
    return f"the {nouns[number % 4]} {verbs[number // 4 % 3]} a {nouns[number // 12 % 4]}"


raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
)
args = SFTConfig(
    options.output_dir,
    max_steps=12,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    max_length=16,
    logging_steps=1,
    save_steps=1000,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    bf16=False,
)
trainer = SFTTrainer(
    model,
    args,
    train_dataset=datasets.Dataset.from_dict({"text": [sentence(number) for number in range(64)]}),
    processing_class=tokenizer,
    peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if options.lora else None,
    callbacks=[Kill(), HpcaccelCallback()],
)
trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))
trainer.save_model(f"{args.output_dir}/final")
print(json.dumps({"step": trainer.state.global_step}), flush=True)
