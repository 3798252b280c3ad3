"""Program of the full preflight check: every rank computes alone on its device, then all ranks do one all-reduce.

Usage: ``python -c TEXT TIMEOUT_SECONDS`` in the ranks' own Python, which may not have hpcaccel. ``preflight`` passes
the text of this file; nothing imports it. Each rank prints JSON lines with ``rank``, ``node`` and one result:
``skipped`` (no torch), ``alone`` (its own computation failed), ``came`` (its own computation succeeded), ``done`` (the
all-reduce succeeded), ``together`` (the all-reduce failed).
"""

from __future__ import annotations

import json
import os
import socket
import sys
from datetime import timedelta
from typing import Any


def report(**result: object) -> None:
    """Print one result of this rank."""
    result.update(rank=int(os.environ["RANK"]), node=os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    os.write(1, json.dumps(result).encode() + b"\n")


def _other_accelerator(torch: Any) -> str | None:
    """The kind of accelerator that this torch can use besides CUDA and ROCm, such as ``xpu``; None if there is none, or
    none with collectives."""
    accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
    if accelerator is None or not accelerator.is_available():
        return None
    kind = str(accelerator.current_accelerator().type)
    return kind if torch.distributed.Backend.default_device_backend_map.get(kind, "gloo") != "gloo" else None


def main(timeout_seconds: float) -> None:
    """Run the check as the rank that the environment names."""
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        report(skipped=str(error))
        sys.exit(0)
    try:
        kind, gpus = "cuda", torch.cuda.device_count()
        if not gpus and (found := _other_accelerator(torch)) is not None:
            kind, gpus = found, torch.get_device_module(found).device_count()
        device = torch.device(kind, local % gpus) if gpus else torch.device("cpu")
        ones = torch.ones(256, 256, device=device)
        if (ones @ ones).ne(256).any():
            raise RuntimeError(f"{device} returned a wrong matrix product")
        if gpus:
            torch.get_device_module(kind).set_device(device)
    except Exception as error:
        report(alone=f"{type(error).__name__}: {error}"[:300])
        sys.exit(1)
    report(came=True)
    try:
        backend = dist.Backend.default_device_backend_map[kind if gpus else "cpu"]
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
        numbers = torch.full((1 << 18,), float(rank + 1), device=device)
        dist.all_reduce(numbers)
        if numbers.ne(world * (world + 1) / 2).any():
            raise RuntimeError("the all-reduce over all ranks returned a wrong sum")
        report(done=True)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        report(together=f"{type(error).__name__}: {error}"[:300])
        os._exit(1)


if __name__ == "__main__":
    main(float(sys.argv[1]))
