"""Program that calls a function of the user's script on each TPU core. ``hpcaccel launch --tpu`` becomes it.

Usage: ``python -m hpcaccel.launch.tpu_program [--module] FUNCTION SCRIPT ARGUMENTS``
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    """Import the script as a module, and call its function on every core."""
    words = sys.argv[1:]
    is_module = words[:1] == ["--module"]
    function, script, *rest = words[is_module:]
    sys.argv = [script, *rest]
    found = getattr(_imported(script, is_module=is_module), function, None)
    if found is None:
        sys.exit(f"error: {script} has no function {function!r}: name the one to run with --main-training-function")
    try:
        from torch_xla.distributed import xla_multiprocessing  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        sys.exit(f"error: --tpu needs torch_xla in {sys.executable}: {error}")

    def on_core(index: int) -> None:
        found()

    xla_multiprocessing.spawn(on_core, args=())


def _imported(script: str, *, is_module: bool) -> ModuleType:
    if is_module:
        return importlib.import_module(script)
    sys.path.insert(0, str(Path(script).resolve().parent))
    return importlib.import_module(Path(script).stem)


if __name__ == "__main__":
    main()
