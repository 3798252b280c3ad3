"""Answers a file of prompts with a language model, on all ranks. Stopped or killed, it continues where it was.

The prompts are JSON lines with the key ``prompt``. The answers are in the same order, one JSON line each.
"""

import argparse
import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hpcaccel

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="name or directory")
parser.add_argument("--prompts", type=Path, default=Path(__file__).with_name("prompts.jsonl"))
parser.add_argument("--output", type=Path, required=True)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--max-new-tokens", type=int, default=128)
parser.add_argument("--temperature", type=float, default=0.0, help="0: the most probable token")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--offload", type=Path, help="for a model that is larger than a GPU: a folder on the node")
parser.add_argument("--gpu-memory", default="20GiB", help="with --offload: for weights, on each GPU")
parser.add_argument("--cpu-memory", default="40GiB", help="with --offload: for weights, of each rank")


def main():
    args = parser.parse_args()
    state = hpcaccel.PartialState()
    with args.prompts.open(encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    settings = {"model": args.model, "max_new_tokens": args.max_new_tokens}
    settings |= {"temperature": args.temperature, "seed": args.seed}
    results = hpcaccel.ResultsFile(args.output, prompts, batch_size=args.batch_size, settings=settings)
    if results.missing:
        tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
        model = load(args, state)
    with state.split_between_processes(results.missing) as mine:
        for batch in results.until_stopped(mine):
            hpcaccel.set_seed(args.seed + batch.number)  # the same samples on any rank and in any attempt
            results.write(batch, answers(model, tokenizer, batch.items, args, state.device))
    results.merge()
    state.print(f"{len(prompts)} answers are in {args.output}")


def load(args, state):
    if args.offload is None:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(state.device).eval()
    folder = args.model if Path(args.model).is_dir() else snapshot_download(args.model)
    with hpcaccel.init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.tie_weights()
    model.generation_config = GenerationConfig.from_pretrained(folder)
    # Blocks go to this rank's GPU while they fit, then to CPU memory; the rest is read from the files at each use.
    memory = {"cpu": args.cpu_memory}
    if state.device.type != "cpu":
        memory[state.device.index] = args.gpu_memory
    return hpcaccel.load_checkpoint_and_dispatch(
        model,
        folder,
        device_map="auto",
        max_memory=memory,
        no_split_module_classes=model._no_split_modules,
        offload_folder=args.offload,  # each rank uses a folder of its own inside
    ).eval()


@torch.inference_mode()
def answers(model, tokenizer, prompts, args, device):
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True).to(device)
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    tokens = model.generate(**inputs, max_new_tokens=args.max_new_tokens, **sampling)
    return tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    main()
