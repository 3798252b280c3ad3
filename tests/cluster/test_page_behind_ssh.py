"""The page of a service on a laptop, for a real Slurm behind a real sshd: from the form to the end of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.remote.login_node import LoginNode

from .browsing import SWEEP, Browsing, browsing, spec_of
from .scenario import PROGRAMS, Scenario


@pytest.mark.chaos
def test_a_run_and_a_sweep_behind_ssh_on_the_page(
    login: LoginNode, lease: Callable[[int], list[str]], tmp_path: Path
) -> None:
    (name,) = lease(1)

    def spec(seconds: float, more: str = "") -> str:
        python = f"environment: {{python: {sys.executable}}}\n"
        return spec_of("from-laptop", name, seconds=seconds, more=python + more)

    (login.client / "descends.py").write_text((PROGRAMS / "descends.py").read_text())
    laptop = Scenario(None, login.client)
    laptop.env = login.environment()
    with browsing(laptop) as tab:
        _run(tab, login, spec)
        _sweep(tab, spec)


def _run(tab: Browsing, login: LoginNode, spec: Callable[..., str]) -> None:
    page = tab.page
    _choose_cluster(tab)
    page.fill("#submit-yaml", spec(1).replace("partition: gpu", "partition: gpuu"))
    tab.see("#submit-list .is-wrong", "'gpuu' is not on cluster 'alps'")
    page.fill("#submit-yaml", spec(1))
    tab.see("#submit-state", "valid")
    tab.see("#submit-script", str(login.runs))
    page.locator("#submit-ask").click()
    tab.see("#submit-plan tbody tr", "gpu")
    run_id = tab.submit()
    assert run_id.startswith("alps:")
    tab.see(".run-title h1", "from-laptop")
    tab.see(".run-title .s-running")
    tab.see("#run-log", "step 3")
    tab.see(".run-title .s-completed")
    tab.see("#run-log", "step 16")
    tab.open("")
    tab.see(f"#runs-grid .ag-row[row-id='{run_id}']", "alps")
    tab.open(f"submit?run={run_id}")
    tab.see_value("#submit-yaml", "from-laptop")
    _choose_cluster(tab)
    page.fill("#submit-yaml", spec(20))
    tab.submit()
    tab.see(".run-title .s-running")
    tab.act(".run-title", "Cancel", "Cancel from-laptop?")
    tab.see(".run-title .s-cancelled")


def _sweep(tab: Browsing, spec: Callable[..., str]) -> None:
    page = tab.page
    _choose_cluster(tab)
    page.fill("#submit-yaml", spec(3, SWEEP))
    tab.see("#submit-go:not([disabled])", "Start sweep")
    sweep_id = tab.submit()
    tab.see(".sweep-title .s-running")
    tab.see("#sweep-grid .ag-cell", "running")
    tab.act(".sweep-title", "Stop", "Stop the sweep from-laptop?")
    tab.see(".sweep-title .s-paused")
    tab.act(".sweep-title", "Resume", "Resume the sweep from-laptop?")
    tab.see(".sweep-title .s-running")
    tab.act(".sweep-title", "Cancel", "Cancel the sweep from-laptop?")
    tab.see(".sweep-title .s-cancelled")
    tab.open("sweeps")
    tab.see(f"#sweeps-grid .ag-row[row-id='{sweep_id}']", "from-laptop")


def _choose_cluster(tab: Browsing) -> None:
    """Open the form, if it is not shown, and choose the cluster."""
    if "/submit?run=" not in tab.page.url:
        tab.open("submit")
    tab.page.locator("#submit-cluster").click()
    tab.page.get_by_role("option", name="alps").click()
