"""Scores texts with a language model that is larger than a GPU: each rank has a stage of it, texts pass through all.

The prompts are JSON lines with the key ``prompt``. For each, the output has the mean logarithm of the probabilities
that the model gives to its tokens.
"""

import argparse
import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import hpcaccel

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="name or directory")
parser.add_argument("--prompts", type=Path, default=Path(__file__).with_name("prompts.jsonl"))
parser.add_argument("--output", type=Path, required=True)
parser.add_argument("--length", type=int, default=256, help="tokens: longer prompts are cut, shorter ones padded")
parser.add_argument("--chunk-rows", type=int, default=4, help="prompts that a rank computes at a time")
parser.add_argument("--chunks", type=int, default=8, help="chunks that pass through the ranks one after another")


def main():
    args = parser.parse_args()
    state = hpcaccel.PartialState()
    with args.prompts.open(encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="right")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    example = tokens_of(prompts[:1] * args.chunk_rows, tokenizer, args.length)
    model = hpcaccel.prepare_pippy(model, example_kwargs=example, num_chunks=args.chunks)
    state.print(f"the stages begin at {', '.join(model.hf_split_points) or 'the start'}")
    scores, rows = [], args.chunk_rows * args.chunks
    for start in range(0, len(prompts), rows):  # the last batch has fewer rows
        tokens = tokens_of(prompts[start : start + rows], tokenizer, args.length)
        output = model(**tokens)
        if state.is_last_process:  # the only one that has the output
            scores += score(output.logits.float().cpu(), **tokens)
    if state.is_last_process:
        lines = [json.dumps({"prompt": prompt, "score": one}) for prompt, one in zip(prompts, scores, strict=True)]
        args.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{len(lines)} scores are in {args.output}", flush=True)
    state.wait_for_everyone()


def tokens_of(prompts, tokenizer, length):
    tokens = tokenizer(prompts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    return {name: tokens[name] for name in ("input_ids", "attention_mask")}


def score(logits, input_ids, attention_mask):
    """Mean log-probability of each text's tokens but the first: logits (rows, length, words)."""
    likely = logits[:, :-1].log_softmax(-1).gather(2, input_ids[:, 1:, None])[..., 0]
    counts = attention_mask[:, 1:]
    return ((likely * counts).sum(1) / counts.sum(1).clamp(min=1)).tolist()


if __name__ == "__main__":
    main()
