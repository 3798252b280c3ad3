"""Stand-ins for what three of the scripts download from a hub: a model, a tokenizer, a dataset and a metric.

They are in the folder in which the ranks are started, under the names that the scripts use: transformers, datasets
and evaluate look there first. The model is a BERT of two narrow layers with random weights,
the data are pairs of made-up sentences, and whether a pair is a paraphrase follows from its words.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

__all__ = ["make"]

MODELS = ("bert-base-cased", "hf-internal-testing/mrpc-bert-base-cased")
WORDS = ("a", "the", "cat", "dog", "sat", "ran", "on", "to", "mat", "house", "big", "small")
SAMPLES = {"train": 64, "validation": 42}

METRIC = '''
import datasets
import evaluate


class Glue(evaluate.Metric):
    """Accuracy, and F1 of class 1."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        pairs = list(zip(predictions, references))
        right = sum(p == r for p, r in pairs)
        both = sum(p == r == 1 for p, r in pairs)
        either = sum(p == 1 for p, _ in pairs) + sum(r == 1 for _, r in pairs)
        return {"accuracy": right / len(pairs), "f1": 2 * both / either if either else 0.0}
'''


def make(folder: Path) -> None:
    for name in MODELS:
        _make_model(folder / name)
    _make_data(folder / "nyu-mll" / "glue")
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(METRIC)


def _make_model(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    folder.mkdir(parents=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    BertTokenizer(str(folder / "vocab.txt"), model_max_length=128).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.5,  # so that not all predictions are one class
    )
    BertForSequenceClassification(config).save_pretrained(folder)


def _make_data(folder: Path) -> None:
    folder.mkdir(parents=True)
    chance = random.Random(0)
    for split, count in SAMPLES.items():
        lines = []
        for index in range(count):
            words = chance.choices(WORDS, k=chance.randint(3, 12))
            label = index % 2
            other = chance.sample(words, len(words)) if label else chance.choices(WORDS, k=len(words))
            pair = {"sentence1": " ".join(words), "sentence2": " ".join(other), "label": label, "idx": index}
            lines.append(json.dumps(pair) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in SAMPLES)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
