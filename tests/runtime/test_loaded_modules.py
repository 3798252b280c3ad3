"""Tests of the list of modules that warm parents import, and of what these imports do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hpcaccel.runtime.training.loaded_modules import PACKAGES

LISTS = """
import json, os
os.environ["LEVEL"] = "2"
del os.environ["GONE"]
import calendar, einops, email.message, mine, yaml
from hpcaccel.runtime.training.loaded_modules import list_modules
print(json.dumps(list_modules()))
"""


def test_only_safe_modules_are_listed_and_changed_variables(tmp_path: Path) -> None:
    for name in ("calendar", "einops", "mine"):  # the program's own, whatever their names
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "program.py").write_text(LISTS)
    environment = {**os.environ, "LEVEL": "1", "SAME": "1", "GONE": "1"}
    command = [sys.executable, str(tmp_path / "program.py")]
    said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    report: dict[str, Any] = json.loads(said)
    assert report["changed"] == ["GONE", "LEVEL"]
    names = report["modules"]
    assert {"email", "email.message", "yaml", "hpcaccel.core.durable_files"} <= set(names)
    assert not {"__main__", "calendar", "einops", "mine"} & set(names)
    assert names.index("email") < names.index("email.message")
    assert {name.partition(".")[0] for name in names} == set(report["origins"])


IMPORTS = """
import importlib.util, json, os, sys
from hpcaccel.node.warm.preload import MODULES, Preload
names = [name for name in json.loads(sys.argv[1]) if importlib.util.find_spec(name)]
hpcaccel = ["hpcaccel.runtime." + name for name in (
    "training_session", "preparation", "model_preparation", "data.loader", "parallel.fsdp", "training.loaded_modules",
    "checkpointing.checkpoint_manager", "checkpointing.snapshot_manager",
)]
files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
preload = Preload([*names, *hpcaccel, "hpcaccel.checkpoint.engine", *MODULES])
problem = preload.run()
import torch
with open(f"/proc/self/task/{os.getpid()}/children") as file:
    children = file.read().split()
print(json.dumps({
    "problem": problem, "threads": len(os.listdir("/proc/self/task")) - threads,
    "files": len(os.listdir("/proc/self/fd")) - files, "children": children,
    "cuda": torch.cuda.is_initialized(), "read": sorted(preload._read), "missing": [
        name for name in [*hpcaccel, "torch"] if name not in sys.modules],
}))
"""
RANK = ("RANK", "WORLD_", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "TORCH_FR_", "HPCACCEL_", "SLURM_")


def test_imports_in_advance_keep_nothing_of_the_process_or_its_rank() -> None:
    command = [sys.executable, "-c", IMPORTS, json.dumps(sorted(PACKAGES))]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # NumPy's threads end before a fork
    said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(said)
    assert [name for name in found.pop("read") if name.startswith(RANK)] == []
    assert found == {"problem": "", "threads": 0, "files": 0, "children": [], "cuda": False, "missing": []}
