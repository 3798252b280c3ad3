"""The page of a run on a real Slurm: it trains, an urgent job preempts it, it continues, the button cancels it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ..browser.chromium import chromium
from .dev_cluster import Cluster
from .scenario import Scenario

WAIT = 300_000
"""Longest wait for a step of the scenario, in milliseconds."""


@pytest.fixture
def scenario(cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(1))


@pytest.fixture
def link(scenario: Scenario) -> Iterator[str]:
    """The link of ``hpcaccel serve`` with the scenario's environment."""
    words = [sys.executable, "-m", "hpcaccel", "serve", "--no-browser"]
    process = subprocess.Popen(words, cwd=scenario.folder, env=scenario.env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.terminate()
    process.communicate(timeout=60)


@pytest.mark.chaos
def test_a_preempted_run_is_watched_and_cancelled(scenario: Scenario, link: str) -> None:
    scenario.train("--pause", "0.3", slurm={"nodes": 1})
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(WAIT)
        parts = urlsplit(link)
        page.goto(f"{parts.scheme}://{parts.netloc}/run/{scenario.dir.run_id}?{parts.query}")
        page.locator(".run-title .s-running").wait_for()
        page.locator(".life-part.p-training").wait_for()
        page.locator(".tile", has_text="Work at risk").wait_for()
        scenario.wait_for_step(4)
        scenario.preempt()
        page.locator("#run-attempts .s-preempted").wait_for()
        page.locator(".life-part.p-queued").nth(1).wait_for()
        scenario.wait_for_step(8, attempt=2)
        page.locator(".run-title .s-running").wait_for()
        assert page.locator("#run-attempts tbody tr").count() == 2
        page.locator("#run-head button", has_text="Cancel").click()
        dialog = page.get_by_role("dialog", name="Cancel scenario?")
        dialog.locator("#confirm-yes").click()
        page.locator(".run-title .s-cancelled").wait_for()
        assert scenario.wait_until_over() == 130
