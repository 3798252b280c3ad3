from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.node.classify import classify
from hpcaccel.rundir import RunDir

TRACEBACK = "Traceback (most recent call last):\n  File 'x.py', line 1\n"


@pytest.mark.parametrize(
    ("logs", "exit_code", "kind", "sentence"),
    [
        ({0: TRACEBACK + "ValueError: no"}, 1, "exception", "rank 0: ValueError: no"),
        ({0: f"[rank0]: {TRACEBACK}[rank0]: pkg.MyError: bad"}, 1, "exception", "rank 0: pkg.MyError: bad"),
        ({0: TRACEBACK + "torch.OutOfMemoryError: CUDA"}, 1, "out_of_memory", "rank 0: torch.OutOfMemoryError: CUDA"),
        ({0: TRACEBACK + "ModuleNotFoundError: x"}, 1, "import_error", "rank 0: ModuleNotFoundError: x"),
        (
            {0: TRACEBACK + "RuntimeError: gloo: Connection closed by peer", 3: TRACEBACK + "KeyError: 'lr'"},
            1,
            "exception",
            "rank 3: KeyError: 'lr'",
        ),
        ({0: TRACEBACK + "    raise NotGood(1)\npkg.NotGood: 1"}, 1, "exception", "rank 0: pkg.NotGood: 1"),
        ({0: TRACEBACK + "    raise NotGood(1)\nNotGood"}, 1, "exception", "rank 0: NotGood"),
        ({0: "all is well"}, 137, "killed", "a rank was killed by SIGKILL"),
        ({0: "usage: x\nx: error: no"}, 2, "user_mistake", "the program ended with code 2, a user's mistake"),
        ({}, 7, "exit", "the program ended with code 7"),
    ],
)
def test_classify(tmp_path: Path, logs: dict[int, str], exit_code: int, kind: str, sentence: str) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    run.attempt(1).mkdir()
    run.supervisor_log(1).write_text(TRACEBACK + "ValueError: of the supervisor\n")
    for rank, text in logs.items():
        run.rank_log(1, rank).write_text(text + "\n")
    assert classify(run, attempt=1, exit_code=exit_code) == (kind, sentence)
