"""``hpcaccel stacks``: runs without stacks, and a run that hung."""

from __future__ import annotations

import json
from pathlib import Path

from .test_local_runs import TALKS, submitted

DUMP = """Thread 0x00000000000000aa (most recent call first):
  File "train.py", line {line} in {function}
"""


def test_stacks_groups_ranks_by_stack_and_refuses_missing_ones(shell, refused):
    run = submitted(shell, TALKS)
    assert shell("wait", run["run_id"]).returncode == 0
    assert "none of its attempts wrote stacks" in refused(shell("stacks", run["run_id"]))

    attempt = Path(run["path"]) / "attempts" / "1"
    (attempt / "heartbeats").mkdir()
    (attempt / "stacks").mkdir(exist_ok=True)
    for rank, (line, function) in enumerate([(31, "meet"), (20, "read"), (31, "meet")]):
        beat = {"rank": rank, "host": "n1", "pid": 1, "number": 1, "time": 0, "interval_seconds": 1}
        beat |= {"phase": "training", "step": 7}
        (attempt / "heartbeats" / f"{rank}.json").write_text(json.dumps(beat))
        (attempt / "stacks" / f"{rank}.txt").write_text(DUMP.format(line=line, function=function))
    shown = shell("stacks", run["run_id"])
    assert shown.stdout == ("rank 1 on n1:\n    train.py:20 in read\n\nranks 0, 2 on n1:\n    train.py:31 in meet\n\n")
    assert "these stacks were written in attempt 1" in shown.stderr
    groups = json.loads(shell("stacks", run["run_id"], "--json").stdout)["groups"]
    assert [group["ranks"] for group in groups] == [[1], [0, 2]]
    assert shell("stacks", run["run_id"], "--rank", "1").stdout == "main thread:\n    train.py:20 in read\n\n"
    result = shell("stacks", run["run_id"], "--rank", "7")
    assert result.returncode == 2
    assert "error: no stacks of rank 7: it did not respond or does not exist (stacks of: ranks 0-2)" in result.stderr


def test_stacks_of_a_program_without_heartbeats_is_an_error(shell, refused):
    waits = TALKS.replace("echo to stderr >&2; exit ${CODE:-0}", "sleep 60")
    run = submitted(shell, waits)
    try:
        assert "or uses neither" in refused(shell("stacks", run["run_id"]))
    finally:
        shell("cancel", run["run_id"])
