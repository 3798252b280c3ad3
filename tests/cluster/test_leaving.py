"""Ranks exit within seconds on a real Slurm, whatever ends them and whatever their loaders' workers do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .dev_cluster import Cluster
from .scenario import Scenario

PROGRAM = Path(__file__).parents[1] / "runtime" / "programs" / "leaving.py"
SECONDS = 60
"""From the cause of the exit to the attempt's end. A rank that waits for its workers takes five minutes or more."""

ENDS: dict[str, list[tuple[str, str]]] = {
    "ok": [("completed", "end")],
    "raise": [("failed", "restart"), ("completed", "end")],
    "exit": [("failed", "restart"), ("completed", "end")],
    "stop": [("stop", "pause")],
    "preempt": [("preempted", "requeue"), ("completed", "end")],
}
IN_MAKE_TEST = [("preempt", "persistent", "srun")]
ROWS = [(how, kind, launcher) for how in ENDS for kind in ("plain", "persistent") for launcher in ("torchrun", "srun")]


@pytest.mark.chaos
@pytest.mark.torch
@pytest.mark.parametrize(
    ("how", "kind", "launcher"),
    [pytest.param(*row, marks=() if row in IN_MAKE_TEST else pytest.mark.chaos) for row in ROWS],
)
def test_ranks_with_loader_workers_exit_within_seconds(
    cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path, how: str, kind: str, launcher: str
) -> None:
    run = Scenario(cluster, tmp_path, nodes=lease(1))
    from_outside = how in ("stop", "preempt")
    spec: dict[str, Any] = {"slurm": {"nodes": 1}, "launcher": launcher}
    arguments = ["wait" if from_outside else how, kind]
    run.submit({"entrypoint": {"script": str(PROGRAM), "args": arguments}, **spec})
    run.wait_for_word("at step 3", rank=1)
    if how == "stop":
        run.cli("stop", run.dir.run_id)
    if how == "preempt":
        run.preempt()
    run.wait_for_ends(1, timeout_seconds=SECONDS)
    assert run.wait_until_over() == (85 if how == "stop" else 0), run.story
    assert run.ends == ENDS[how], run.story
    if from_outside:
        assert run.lines("end")[0]["checkpoint_step"] >= 3, run.story
