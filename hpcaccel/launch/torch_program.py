"""Program that reports torch's version and devices as one JSON line.

Usage: ``python -c TEXT`` in the ranks' own Python, which may not have hpcaccel. ``environment_report`` passes the text
of this file; nothing imports it. A torch that cannot be imported, or that ends the process, harms only this process.
"""

from __future__ import annotations

import json
import os
from typing import Any


def facts() -> dict[str, Any]:
    """Versions, and the devices of the accelerator that torch was built for."""
    import torch as installed

    torch: Any = installed  # parts of it have no annotations, and old versions lack some
    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "nccl": None,
        "cudnn": None,
        "backends": [],
        "kind": "cpu",
        "devices": [],
    }
    if torch.distributed.is_available():
        names = ("gloo", "nccl", "mpi", "ucc", "xccl")
        available = ((name, getattr(torch.distributed, f"is_{name}_available", None)) for name in names)
        found["backends"] = [name for name, check in available if check is not None and check()]
    if "nccl" in found["backends"]:
        version = torch.cuda.nccl.version()
        found["nccl"] = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    if torch.backends.cudnn.is_available():
        found["cudnn"] = torch.backends.cudnn.version()
    accelerator = getattr(torch, "accelerator", None)
    current = accelerator.current_accelerator() if accelerator is not None and accelerator.is_available() else None
    if current is not None and accelerator is not None:
        found["kind"] = current.type
        found["devices"] = [_device(current.type, index) for index in range(accelerator.device_count())]
    return found


def _device(kind: str, index: int) -> dict[str, Any]:
    import torch

    module = getattr(torch, kind)
    if not hasattr(module, "get_device_properties"):
        return {"name": kind, "bytes": None}
    properties = module.get_device_properties(index)
    return {"name": properties.name, "bytes": properties.total_memory}


if __name__ == "__main__":
    os.write(1, b"\n" + json.dumps(facts()).encode() + b"\n")
