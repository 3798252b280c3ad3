"""Program behind ``python -m hpcaccel.commands.launch`` and the other modules of Accelerate's ``commands`` that can be
started: runs hpcaccel's own command. Nothing imports it; ``hpcaccel.runtime.compat.import_paths`` names it as their
source."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec

from hpcaccel.cli.main import main

COMMANDS = {
    "accelerate_cli": [],
    "config.config": ["config"],
    "env": ["env"],
    "estimate": ["estimate-memory"],
    "launch": ["launch"],
    "merge": ["merge-weights"],  # refused, with what to use instead
    "test": ["test"],
}
"""The words before the arguments, by module."""

if __name__ == "__main__":
    spec: ModuleSpec = __spec__
    main([*COMMANDS[spec.name.removeprefix("hpcaccel.commands.")], *sys.argv[1:]])
