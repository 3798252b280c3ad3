from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcaccel.spec import load_spec
from hpcaccel.submission.codecopy import plan_code
from hpcaccel.submission.entry import Entry
from hpcaccel.submission.foresight import advice

FOUR_LINES = "from hpcaccel import Accelerator\naccelerator = Accelerator()\nm = accelerator.prepare(m)\n"


def told(folder: Path, script: str, *, copy: bool = True, **runtime: Any) -> str:
    (folder / "train.py").write_text(script)
    (folder / "job.yaml").write_text(f"name: x\nentrypoint: {{script: train.py}}\nruntime: {runtime}\n")
    plan = plan_code(folder) if copy else None
    return " ".join(advice(load_spec(folder / "job.yaml"), Entry(folder / "train.py", folder), plan))


@pytest.mark.parametrize("line", ["for epoch in a.epochs(3): ...", "a.resume()", "a.steps(9)", "a.load_state()"])
def test_a_script_that_takes_up_a_checkpoint_needs_no_advice(tmp_path: Path, line: str) -> None:
    assert told(tmp_path, FOUR_LINES + line) == ""


def test_a_script_that_never_loads_is_told_so(tmp_path: Path) -> None:
    assert "train.py never loads a checkpoint" in told(tmp_path, FOUR_LINES)
    assert "train.py never loads a checkpoint" in told(tmp_path, FOUR_LINES, copy=False)


def test_another_file_of_the_code_may_do_it(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("def run(accelerator):\n    accelerator.resume()\n")
    assert told(tmp_path, FOUR_LINES + "import loop") == ""


def test_a_script_without_hpcaccel_is_told_how_it_is_stopped(tmp_path: Path) -> None:
    assert "set runtime.stop to signals" in told(tmp_path, "import torch\n")
    assert told(tmp_path, "import torch\n", stop="signals") == ""


def test_a_script_that_is_no_python_is_left_to_the_ranks(tmp_path: Path) -> None:
    assert "does not use hpcaccel" in told(tmp_path, "this is not python\n")
