"""A rank that diverges from the others in any way is named within the hang timeout, and the run restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import Cluster
from .scenario import Scenario

PROGRAM = Path(__file__).parents[1] / "runtime" / "programs" / "parting.py"
HANG_SECONDS = 15
LEFT = "has left its loop at"

WAYS = {
    "exit": ("hang", LEFT),
    "break": ("hang", LEFT),
    "return": ("hang", LEFT),
    "exception": ("exception", "ValueError: as told"),
    "os_exit": ("gloo_timeout", "exited or hung without an exception"),
    "stopped": ("hang", "has sent no heartbeat"),
    "skip": ("hang", ""),  # it skips until its data is used up
    "evaluation": ("hang", "has not entered the collective"),
    "shapes": ("exception", "needs matching arguments on all ranks"),
}
IN_MAKE_TEST = [("exit", 3, "ddp")]
ROWS = [(how, rank, strategy) for how in WAYS for rank in (0, 3) for strategy in ("ddp", "fsdp")]


@pytest.mark.chaos
@pytest.mark.torch
@pytest.mark.parametrize(
    ("how", "rank", "strategy"),
    [pytest.param(*row, marks=() if row in IN_MAKE_TEST else pytest.mark.chaos) for row in ROWS],
)
def test_diverging_rank_is_named_and_the_run_restarts(
    cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path, how: str, rank: int, strategy: str
) -> None:
    run = Scenario(cluster, tmp_path, nodes=lease(2))
    arguments = ["--how", how, "--rank", str(rank), "--strategy", strategy]
    run.submit(
        {
            "entrypoint": {"script": str(PROGRAM), "args": arguments},
            "checkpoint": {"every_steps": 5},
            "resilience": {"hang_timeout_seconds": HANG_SECONDS},
        }
    )
    assert run.wait_until_over() == 0, run.story
    assert run.ends == [("failed", "restart"), ("completed", "end")], run.story
    end = run.lines("end")[0]
    kind, words = WAYS[how]
    assert end["error_class"] == kind, run.story
    assert words in end["detail"], run.story
    if how != "shapes":
        assert f"rank {rank} on {run.nodes[rank // 2]}" in end["detail"], run.story
