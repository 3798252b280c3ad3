# ruff: noqa: E501  (messages stand here in one piece)
from __future__ import annotations

import subprocess
import sys


def test_the_room_imports_nothing_heavy() -> None:
    program = (
        "import sys, hpcaccel.spec\n"
        "print(*sorted({'torch', 'numpy', 'optuna', 'fabric', 'submitit', 'jinja2', 'rich', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
