# ruff: noqa: E501  (error messages are not wrapped)
from __future__ import annotations

import subprocess
import sys


def test_importing_spec_imports_no_heavy_dependency() -> None:
    program = (
        "import sys, hpcaccel.spec\n"
        "print(*sorted({'torch', 'numpy', 'optuna', 'fabric', 'submitit', 'jinja2', 'rich', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
