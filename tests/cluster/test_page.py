"""The page of a run on a real Slurm: it trains, an urgent job preempts it, it continues, the button cancels it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .browsing import browsing
from .dev_cluster import Cluster
from .scenario import Scenario


@pytest.fixture
def scenario(cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(1))


@pytest.mark.chaos
def test_a_preempted_run_is_watched_and_cancelled(scenario: Scenario) -> None:
    scenario.train("--pause", "0.3", "--always", slurm={"nodes": 1})
    with browsing(scenario) as tab:
        page = tab.page
        tab.open(f"run/{scenario.dir.run_id}")
        page.locator(".run-title .s-running").wait_for()
        page.locator(".life-part.p-training").wait_for()
        page.locator(".tile", has_text="Work at risk").wait_for()
        scenario.wait_for_step(4)
        scenario.preempt()
        page.locator("#run-attempts .s-preempted").wait_for()
        page.locator(".life-part.p-training ~ .life-part.p-queued").first.wait_for()
        scenario.wait_for_step(8, attempt=2)
        page.locator(".run-title .s-running").wait_for()
        assert page.locator("#run-attempts tbody tr").count() == 2
        tab.act("#run-head", "Cancel", "Cancel scenario?")
        page.locator(".run-title .s-cancelled").wait_for()
        assert scenario.wait_until_over() == 130
