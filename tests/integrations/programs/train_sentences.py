"""A script that calls sentence-transformers' Trainer on a small random BERT; two lines are hpcaccel's."""

import argparse
import json
import os
import signal
import tempfile

import datasets
import torch
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, TrainerCallback

from hpcaccel.integrations.transformers import HpcaccelCallback, newest_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", required=True)
parser.add_argument("--kill", help="RANK:STEP: this rank sends itself SIGTERM in this step")
options = parser.parse_args()

WORDS = ["[UNK]", "[PAD]", "the", "a", "dog", "cat", "bird", "fish", "eats", "sees", "likes"]


class Kill(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if options.kill == f"{os.environ['RANK']}:{state.global_step + 1}":
            os.kill(os.getpid(), signal.SIGTERM)


def sentence(number):
    nouns, verbs = WORDS[4:8], WORDS[8:11]
    return f"the {nouns[number % 4]} {verbs[number // 4 % 3]} a {nouns[number // 12 % 4]}"


def random_bert(folder):
    """A model over a random BERT, which is saved in ``folder`` first because ``Transformer`` loads it from files."""
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="[UNK]", pad_token="[PAD]", model_max_length=16
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        pad_token_id=1,
    )
    BertModel(config).save_pretrained(folder)
    transformer = Transformer(folder)
    return SentenceTransformer(modules=[transformer, Pooling(16)], device="cpu")


with tempfile.TemporaryDirectory() as folder:
    model = random_bert(folder)
texts = [sentence(number) for number in range(49)]
args = SentenceTransformerTrainingArguments(
    options.output_dir,
    max_steps=12,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    logging_steps=1,
    save_steps=1000,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = SentenceTransformerTrainer(
    model,
    args,
    train_dataset=datasets.Dataset.from_dict({"anchor": texts[:-1], "positive": texts[1:]}),
    loss=MultipleNegativesRankingLoss(model),
    callbacks=[Kill(), HpcaccelCallback()],
)
trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))
model.save_pretrained(f"{args.output_dir}/final")
print(json.dumps({"step": trainer.state.global_step}), flush=True)
