"""Measure a model that computes on the CPU with its weights on disk, compared with Accelerate: seconds and peak memory.

    python benchmarks/big_models.py

A model of 1.1 GB is generated from a seed and written as safetensors shards. Fresh processes take turns. Each of them

- loads the shards with ``load_checkpoint_and_dispatch``, all parts on disk but the last norm, because Accelerate
  refuses safetensors files if all are, and runs several forward passes; or
- gives an empty model the weights of a folder with ``disk_offload``, and runs several forward passes.

The files stay in the page cache: the disk itself is not measured. Peak memory is the process's VmHWM, which includes
pages of files that are mapped. Exits with 1 if hpcaccel takes longer than Accelerate in the median of the turns, needs
more memory, or if a result is not equal to that of the model in memory.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH, BLOCKS, WORDS = 2048, 8, 8192
LIMIT = 1.0
"""Largest share of Accelerate's time and of its memory."""
LIBRARIES = ("hpcaccel", "accelerate")
WORKS = ("shards", "folder")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = hidden + self.narrow(torch.relu(self.wide(self.norm(hidden))))
        return found


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words)
        for block in self.blocks:
            hidden = block(hidden)
        found: torch.Tensor = self.head(self.norm(hidden))
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--passes", type=int, default=4, help="forward passes in a process")
    parser.add_argument("--one", nargs=3, metavar=("LIBRARY", "WORK", "DIRECTORY"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measure(*options.one, passes=options.passes)))
        return 0
    if importlib.util.find_spec("accelerate") is None:
        print("accelerate is not installed. Install it with: pip install 'hpcaccel[bench]'")
        return 1
    with tempfile.TemporaryDirectory(prefix="hpcaccel-big-models-") as directory:
        command = [sys.executable, __file__, "--one", "torch", "write", directory]
        right = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        )
        return compare(Path(directory), right, turns=options.turns, passes=options.passes)


def compare(directory: Path, right: dict[str, Any], *, turns: int, passes: int) -> int:
    print(
        f"{right['bytes'] / 1e9:.2f} GB of weights in {right['shards']} shards, {passes} passes in a process, "
        f"{turns} turns, torch {torch.__version__} with {torch.get_num_threads()} threads; medians\n"
    )
    print(f"{'':24}{'hpcaccel':>12}{'accelerate':>12}{'share':>8}{'limit':>8}")
    passed = True
    for work in WORKS:
        found: dict[str, list[dict[str, Any]]] = {library: [] for library in LIBRARIES}
        for turn in range(turns):
            for library in LIBRARIES if turn % 2 else reversed(LIBRARIES):
                found[library].append(_process(library, work, directory, passes))
        if any(one["result"] != right["result"] for one in found["hpcaccel"]):
            print(f"{work}: the result is not equal to that of the model in memory")
            passed = False
        for what, unit, scale in (("load", "s", 1), ("a pass", "s", 1), ("all", "s", 1), ("peak memory", "MB", 1e6)):
            ours, theirs = (statistics.median(one[what] for one in found[library]) / scale for library in LIBRARIES)
            limit = LIMIT if what in ("all", "peak memory") else None
            within = limit is None or ours <= theirs * limit
            passed = passed and within
            figures = f"{f'{ours:.2f} {unit}':>12}{f'{theirs:.2f} {unit}':>12}{ours / theirs:8.2f}"
            print(f"{f'{work}: {what}':24}{figures}{limit or '':>8}{'' if within else '  too much'}")
    return 0 if passed else 1


def _process(library: str, work: str, directory: Path, passes: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--passes", str(passes), "--one", library, work, str(directory)]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    )
    return found


def measure(library: str, work: str, directory: str, *, passes: int) -> dict[str, Any]:
    """What one process does."""
    torch.set_grad_enabled(False)
    words = torch.arange(48).reshape(3, 16) * 97 % WORDS
    if library == "torch":
        return write(Path(directory), words)
    package = importlib.import_module(library)
    scratch = Path(directory, f"{library}-{work}")
    with package.init_empty_weights(include_buffers=True):
        model: nn.Module = Model()
    begin = time.perf_counter()
    if work == "shards":
        places = {**dict.fromkeys([name for name, _ in model.named_children()], "disk"), "norm": "cpu"}
        shards = str(Path(directory, "shards"))
        model = package.load_checkpoint_and_dispatch(model, shards, device_map=places, offload_folder=str(scratch))
    else:
        model = package.disk_offload(model, str(Path(directory, "folder")), execution_device=torch.device("cpu"))
    loaded = time.perf_counter()
    for _ in range(passes):
        found = model(words)
    ended = time.perf_counter()
    shutil.rmtree(scratch, ignore_errors=True)
    return {
        "load": loaded - begin,
        "a pass": (ended - loaded) / passes,
        "all": ended - begin,
        "peak memory": peak_bytes(),
        "result": digest(found),
    }


def write(directory: Path, words: torch.Tensor) -> dict[str, Any]:
    """Write the shards, and a folder of raw files; compute the result of the model in memory."""
    from accelerate import Accelerator
    from accelerate.utils import offload_state_dict

    torch.manual_seed(0)
    model = Model()
    Accelerator(cpu=True).save_model(model, str(directory / "shards"), max_shard_size="400MB")
    offload_state_dict(str(directory / "folder"), model.state_dict())
    return {
        "bytes": sum(one.numel() * one.element_size() for one in model.parameters()),
        "shards": len(list((directory / "shards").glob("*.safetensors"))),
        "result": digest(model(words)),
    }


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not report VmHWM")


if __name__ == "__main__":
    sys.exit(main())
