"""Lists the modules that a rank has imported, for its warm parent (``hpcaccel.node.warm``), which imports them too."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.launch_spec import read_launch
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RunDirectoryError

__all__ = ["list_modules", "write_modules"]

PACKAGES = frozenset(
    {
        "PIL", "einops", "hpcaccel", "isal", "numpy", "packaging", "regex", "safetensors", "torch", "torchvision",
        "tqdm", "typing_extensions", "yaml",
    }
)  # fmt: skip
"""Packages outside the standard library that may be imported in advance. Their imports start no threads and no
processes, open no files and no devices, and keep nothing of the process or its rank."""
EXCEPT = (
    "__main__", "antigravity", "idlelib", "this", "tkinter", "turtle",
    "hpcaccel.integrations", "safetensors.flax", "safetensors.mlx", "safetensors.paddle", "safetensors.tensorflow",
    "torch.onnx", "torch.testing", "torch.utils.tensorboard",  # these import packages that are not in PACKAGES
    "torch._inductor",  # may start processes that compile
)  # fmt: skip
"""Modules that are never imported in advance, with their submodules."""
OWN = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TORCH_GLOO_LAZY_INIT"})
"""Variables that torch sets when it is imported, and those that hpcaccel sets later."""
SITES = ("site-packages", "dist-packages")
"""Folders of installed packages. The program's own modules may have any name."""


def _changed_variables() -> list[str]:
    """Names of the environment variables that the program has set, changed or removed, see proc(5)."""
    try:
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return []
    first = dict(os.fsdecode(line).partition("=")[::2] for line in lines if line)
    now = dict(os.environ)
    return sorted(name for name in first.keys() | now.keys() if first.get(name) != now.get(name) and name not in OWN)


def list_modules() -> dict[str, Any]:
    """The imported modules that another process may import in advance, as ``node.warm.preload`` reads them."""
    origins: dict[str, str] = {}
    names = []
    standard = os.path.dirname(os.__file__)
    for name, module in list(sys.modules.items()):
        if any(name == one or name.startswith(f"{one}.") for one in EXCEPT):
            continue
        top = name.partition(".")[0]
        if name == top:
            origin = getattr(getattr(module, "__spec__", None), "origin", None)
            if isinstance(origin, str) and _is_safe(top, origin, standard=standard):
                origins[top] = origin
        if top in origins:
            names.append(name)
    return {"modules": names, "origins": origins, "changed": _changed_variables()}


def _is_safe(name: str, origin: str, *, standard: str) -> bool:
    if name == "hpcaccel":
        return True
    installed = any(site in Path(origin).parts for site in SITES)
    if name in sys.stdlib_module_names:
        return origin in ("built-in", "frozen") or (origin.startswith(standard) and not installed)
    return name in PACKAGES and installed


def write_modules(run: RunDir, attempt: int) -> None:
    """Write the list into the attempt's folder, if the run's ranks may have warm parents. Raises nothing: without a
    list, restarts begin with new processes."""
    try:
        if read_launch(run).resilience.warm_restart != "off":
            write_json(run.imports(attempt), list_modules(), sync=False)
    except (OSError, RunDirectoryError):
        pass
