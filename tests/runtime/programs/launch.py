"""Starts ranks with ``debug_launcher`` and ``notebook_launcher``, and prints the results as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from hpcaccel.errors import HpcaccelError
from hpcaccel.runtime.accelerator import Accelerator
from hpcaccel.runtime.local_launch import debug_launcher, notebook_launcher

folder = Path(tempfile.mkdtemp())
found: dict[str, Any] = {}


def train(name: str, fails: int | None = None) -> None:
    torch.randn(200, 200) @ torch.randn(200, 200)  # needs OpenMP's threads
    accelerator = Accelerator()
    total = accelerator.reduce(torch.tensor(10.0**accelerator.process_index)).item()
    if accelerator.process_index == fails:
        raise ValueError(f"rank {fails} has had enough")
    place = [accelerator.process_index, accelerator.num_processes, str(accelerator.device)]
    answer = [*place, accelerator.mixed_precision, total, accelerator.state.fork_launched]
    (folder / f"{name}-{accelerator.process_index}").write_text(json.dumps(answer))


def outcome(name: str) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}-*"))]


def error(function: Any, *args: Any, **words: Any) -> list[str]:
    try:
        function(*args, **words)
    except HpcaccelError as raised:
        return [type(raised).__name__, str(raised)]
    return []


torch.randn(500, 500) @ torch.randn(500, 500)  # starts OpenMP's threads in the parent
debug_launcher(train, ("debug",))
found["debug"] = outcome("debug")
debug_launcher(lambda: train("closure"), num_processes=3)
found["closure"] = outcome("closure")
found["debug fails"] = error(debug_launcher, train, ("debug", 1))
found["debug dies"] = error(debug_launcher, lambda: os._exit(7))
notebook_launcher(lambda: train("notebook"), num_processes=2, mixed_precision="bf16", use_port=0)
found["notebook"] = outcome("notebook")
found["notebook fails"] = error(notebook_launcher, train, ("notebook", 0), num_processes=2, use_port=0)
found["precision"] = error(notebook_launcher, train, ("no",), num_processes=2, mixed_precision="fp17")
found["node rank"] = error(notebook_launcher, train, ("no",), num_processes=2, node_rank=1)
found["none"] = error(notebook_launcher, train, ("no",), num_processes=0)
notebook_launcher(train, ("alone",), mixed_precision="bf16")
found["alone"] = outcome("alone")
found["too late"] = error(notebook_launcher, train, ("no",), num_processes=2)
found["variables"] = sorted(
    name for name in os.environ if name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "FORK_LAUNCHED")
)
print(json.dumps(found))
sys.exit(0)
