"""A rank that leaves the training early is named, with the line at which it left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hpcaccel.core.records import Hang
from hpcaccel.node.failures.hangs import find_hang, is_stopped
from hpcaccel.node.failures.heartbeats import Heartbeats
from tests.runtime.ranks import PROGRAMS, Ranks, make_run

PROGRAM = PROGRAMS / "parting.py"
PATIENCE_SECONDS = 240
LINES = {"exit": "sys.exit(0)", "break": "            break  # as told", "return": "            return"}


def line_of(text: str) -> int:
    lines = PROGRAM.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    ("how", "rank", "strategy", "verbs"),
    [
        ("exit", 2, "ddp", True),
        pytest.param("exit", 0, "fsdp", True, marks=pytest.mark.chaos),
        pytest.param("break", 0, "ddp", False, marks=pytest.mark.chaos),
        pytest.param("return", 1, "fsdp", True, marks=pytest.mark.chaos),
    ],
)
def test_rank_that_leaves_early_is_named_while_the_others_wait(
    tmp_path: Path, how: str, rank: int, strategy: str, verbs: bool
) -> None:
    """Found as the supervisor finds it: in the ranks' heartbeats."""
    run = make_run(tmp_path / "run")
    arguments = ["--how", how, "--rank", str(rank), "--strategy", strategy, "--verbs", str(int(verbs))]
    ranks = Ranks("parting.py", *arguments, size=3, run=run)
    try:
        found = watch(Heartbeats(run, 1), ranks)
    finally:
        for process in ranks.processes:
            process.send_signal(signal.SIGKILL)
        ended = ranks.wait()
    assert found is not None, ended.outputs
    assert found.culprit_rank == rank
    assert (
        f"has left its loop at {relative(PROGRAM)}:{line_of(LINES[how])} and reached the end of the program"
        in found.why
    )
    assert "at step 10" in found.why
    assert "have been waiting for" in found.why


def watch(beats: Heartbeats, ranks: Ranks) -> Hang | None:
    end = time.monotonic() + PATIENCE_SECONDS
    found = None
    while found is None and time.monotonic() < end:
        time.sleep(0.2)
        found = find_hang(beats.look(expected_seconds=0.2), 3, is_stopped)
    return found


def relative(path: Path) -> str:
    return os.path.relpath(path)
