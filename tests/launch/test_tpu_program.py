"""The program behind `hpcaccel launch --tpu`, with a stand-in for torch_xla: no TPU was available."""

from __future__ import annotations

from .conftest import Launcher

STAND_IN = "def spawn(function, args):\n    for index in (0, 1):\n        function(index, *args)\n"
SCRIPT = """
import os, sys

def main():
    print("main", sys.argv[1:], os.environ["PJRT_DEVICE"])

def train():
    print("train")
"""


def make(launcher: Launcher) -> None:
    launcher.write("torch_xla/__init__.py", "")
    launcher.write("torch_xla/distributed/__init__.py", "")
    launcher.write("torch_xla/distributed/xla_multiprocessing.py", STAND_IN)
    launcher.write("programs/work.py", SCRIPT)


def test_function_of_the_script_runs_on_each_core(launcher: Launcher) -> None:
    make(launcher)
    result = launcher("--tpu", "programs/work.py", "--x", "1")
    assert result.stdout.splitlines() == ["main ['--x', '1'] TPU"] * 2, result.stderr
    result = launcher("--tpu", "--main-training-function", "train", "-m", "programs.work")
    assert result.stdout.splitlines() == ["train"] * 2, result.stderr


def test_missing_function_and_missing_torch_xla_are_one_line(launcher: Launcher) -> None:
    make(launcher)
    result = launcher("--tpu", "--main_training_function", "fit", "programs/work.py")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "programs/work.py has no function 'fit'" in result.stderr
    launcher.write("torch_xla/distributed/__init__.py", "raise ImportError('no libtpu')\n")
    result = launcher("--tpu", "programs/work.py")
    assert "error: --tpu needs torch_xla in" in result.stderr
    assert "no libtpu" in result.stderr
