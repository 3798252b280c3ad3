"""``hpcaccel.log`` and ``hpcaccel.should_stop`` in programs without an Accelerator."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import hpcaccel
from hpcaccel.core.durable_files import read_lines, write_json
from hpcaccel.core.records import to_dict
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.stop_requests import StopRequest
from hpcaccel.errors import RuntimeMisuse

from .ranks import ROOT, make_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path / "run")
    run.attempt(1).mkdir()
    return run


def start(
    code: str, *, run: RunDir | None = None, attempt: int = 1, rank: int = 0, **more: str
) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HPCACCEL_"))}
    env |= {"PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **more}
    if run is not None:
        env |= {"HPCACCEL_RUN_DIR": str(run.path), "HPCACCEL_ATTEMPT": str(attempt)}
    command = [sys.executable, "-W", "error", "-c", "import hpcaccel\n" + textwrap.dedent(code)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def do(code: str, **where: Any) -> str:
    """Run a program to its end. Returns its stdout, then its stderr."""
    process = start(code, **where)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    return out + error


def logged(path: Path) -> list[tuple[int, int, dict[str, Any]]]:
    return [(line["attempt"], line["step"], line["values"]) for line, _ in read_lines(path)]


def test_logged_lines_have_the_accelerators_format(run: RunDir) -> None:
    code = """
        import sys
        import numpy as np
        hpcaccel.log({"loss": np.float32(0.5), "n": np.int64(3), "note": "x", "parts": {"a": np.ones(1)}}, step=3)
        hpcaccel.log({"loss": float("nan"), "big": float("inf")})
        hpcaccel.log({"file\\ud800": 1})
        assert not {"torch", "pydantic", "optuna"} & set(sys.modules)
    """
    assert do(code, run=run, attempt=2) == ""
    first, second, third = logged(run.metrics)
    assert first == (2, 3, {"loss": 0.5, "n": 3, "note": "x", "parts/a": 1.0})
    assert second[:2] == (2, 4)
    assert math.isnan(second[2]["loss"])
    assert second[2]["big"] == math.inf
    assert third == (2, 5, {"file\ud800": 1})
    (line, *_) = [line for line, _ in read_lines(run.metrics)]
    assert abs(line["time"] - time.time()) < 600


def test_logging_a_bare_number_is_refused() -> None:
    with pytest.raises(
        RuntimeMisuse, match=r"log\(0.25\): expected a dict of names and values, such as \{\"loss\": 0.5\}"
    ):
        hpcaccel.log(0.25)  # type: ignore[arg-type]


def test_only_rank_0_writes_metrics(run: RunDir) -> None:
    assert do("hpcaccel.log({'loss': 1.0})", run=run, rank=1) == ""
    assert not run.metrics.exists()


def test_log_outside_a_run_warns_once(tmp_path: Path) -> None:
    said = do("for i in range(3): hpcaccel.log({'loss': i})\nassert not hpcaccel.should_stop()")
    assert said.count("\n") == 1
    assert said.startswith("hpcaccel.log: this program was not started by hpcaccel")
    assert do("hpcaccel.log({'loss': 1})", rank=1) == ""
    path = tmp_path / "mine.jsonl"
    assert do("for i in range(3): hpcaccel.log({'loss': i})", HPCACCEL_METRICS=str(path)) == ""
    assert logged(path) == [(0, 1, {"loss": 0}), (0, 2, {"loss": 1}), (0, 3, {"loss": 2})]


def test_array_is_left_out_with_one_warning(run: RunDir) -> None:
    code = """
        import warnings
        import numpy as np
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                hpcaccel.log({"weights": np.ones(4), "x": 1})
        print(*[one.message for one in said], said[0].filename)
    """
    said = do(code, run=run)
    assert (
        "log(): 'weights' has type ndarray and is not written, because metrics.jsonl stores only numbers, strings,"
        in said
    )
    assert said.count("weights") == 1
    assert said.endswith(" <string>\n")
    assert [values for _, _, values in logged(run.metrics)] == [{"x": 1}] * 3


def test_last_line_is_written_soon_and_only_once_after_a_fork(run: RunDir) -> None:
    code = """
        import os, sys
        hpcaccel.log({"loss": 1.0})
        hpcaccel.log({"loss": 2.0})  # within the same second: it is kept for a moment
        if os.fork() == 0:
            sys.exit()
        os.wait()
        sys.stdin.read()
    """
    process = start(code, run=run)
    end = time.monotonic() + 30
    while len(logged(run.metrics) if run.metrics.exists() else []) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    process.communicate()
    assert [step for _, step, _ in logged(run.metrics)] == [1, 2]


def test_write_error_is_raised_by_the_next_log_call(run: RunDir) -> None:
    code = """
        import os, pathlib
        folder = pathlib.Path(os.environ["HPCACCEL_RUN_DIR"])
        hpcaccel.log({"loss": 1.0})
        (folder / "metrics.jsonl").rename(folder / "away")
        (folder / "metrics.jsonl").mkdir()
        hpcaccel.log({"loss": 2.0})
        import time
        time.sleep(1.5)
        try:
            hpcaccel.log({"loss": 3.0})
        except IsADirectoryError:
            (folder / "metrics.jsonl").rmdir()
            (folder / "away").rename(folder / "metrics.jsonl")
    """
    assert do(code, run=run) == ""
    assert [step for _, step, _ in logged(run.metrics)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("reason", "then", "stops"),
    [
        ("pruned", "finish", True),
        ("pruned", "pause", True),
        ("stop", "finish", True),
        ("cancelled", "cancel", True),
        ("preempted", "requeue", False),
        ("stop", "pause", False),
    ],
)
def test_should_stop_is_true_for_final_stops_only(run: RunDir, reason: str, then: str, stops: bool) -> None:
    code = """
        import sys
        from hpcaccel.runtime import script_api
        script_api.POLL_SECONDS = 0.01
        print(hpcaccel.should_stop(), flush=True)
        sys.stdin.readline()
        import time
        time.sleep(0.02)
        print(hpcaccel.should_stop())
    """
    process = start(code, run=run)
    assert process.stdout is not None
    assert process.stdout.readline() == "False\n"
    write_json(run.stop(1), to_dict(StopRequest(reason=reason, then=then, time=0.0)))  # type: ignore[arg-type]
    out, error = process.communicate("go\n", timeout=60)
    assert out == f"{stops}\n", error


@pytest.mark.torch
def test_log_and_should_stop_use_an_existing_accelerator(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    code = """
        import torch
        hpcaccel.log({"before": torch.ones(1)}, step=0)
        accelerator = hpcaccel.Accelerator(cpu=True)
        accelerator.log({"loss": 3.0})
        hpcaccel.log({"loss": 2.0}, step=7)
        hpcaccel.log({"acc": torch.tensor(0.5)})
        accelerator._session.loop.finishing = True
        assert hpcaccel.should_stop()
    """
    do(code, run=run, WORLD_SIZE="1")
    lines = [line for line, _ in read_lines(run.metrics)]
    assert [(line["step"], line["values"]) for line in lines] == [
        (0, {"before": 1.0}),
        (0, {"loss": 3.0}),
        (7, {"loss": 2.0}),
        (7, {"acc": 0.5}),
    ]
    assert ["epoch" in line for line in lines] == [False, True, True, True]
    assert json.loads(run.outcome(1).read_text())["last_loss"] == 2.0
