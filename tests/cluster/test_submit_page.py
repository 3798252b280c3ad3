"""The pages of Submit and of a sweep on a real Slurm: from a form to a run, and from a sweep to a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .browsing import SWEEP, browsing, spec_of
from .dev_cluster import Cluster
from .scenario import PROGRAMS, Scenario


@pytest.fixture
def scenario(cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path) -> Scenario:
    (tmp_path / "descends.py").write_text((PROGRAMS / "descends.py").read_text())
    return Scenario(cluster, tmp_path, nodes=lease(1))


def spec(scenario: Scenario, seconds: float, more: str = "") -> str:
    return spec_of("from-form", scenario.nodes[0], seconds=seconds, more=more)


def records(scenario: Scenario, name: str) -> int:
    """Number of runs of this name."""
    return len([*(scenario.folder / "runs" / name).glob("*/record.json")])


@pytest.mark.chaos
def test_a_job_from_the_form_is_submitted_once_and_trains_to_its_end(scenario: Scenario) -> None:
    with browsing(scenario) as tab:
        tab.open("submit")
        page, text = tab.page, spec(scenario, 1)
        page.fill("#submit-yaml", text.replace("  nodes: 1", "  nods: 1"))
        tab.see("#submit-list .is-wrong", "Did you mean 'nodes'?")
        tab.see("#submit-gutter .is-wrong", "6", hidden=True)
        assert page.locator("#submit-go").is_disabled()
        page.fill("#submit-yaml", text)
        tab.see("#submit-state", "valid")
        tab.see("#submit-script", "#SBATCH --partition=gpu")
        tab.see_value(".submit-form input", "from-form")
        name = page.locator(".submit-form input").first
        name.fill("typed-name")
        name.blur()
        tab.see("#submit-script", "#SBATCH --job-name=typed-name")
        tab.see_value("#submit-yaml", "# A job of the development cluster.\nname: typed-name\n")
        page.locator("#submit-ask").click()
        assert ", in " in tab.see("#submit-plan tbody tr", "gpu").inner_text()
        assert records(scenario, "typed-name") == 0
        run_id = tab.submit()
        assert page.url.endswith(f"/run/{run_id}")
        tab.see(".run-title h1", "typed-name")
        tab.see(".run-title .s-running")
        tab.see("#run-log", "step 3")
        tab.see(".run-title .s-completed")
        tab.see("#run-log", "step 16")
        assert records(scenario, "typed-name") == 1
        tab.open(f"submit?run={run_id}")
        tab.see_value("#submit-yaml", "typed-name")
        again = tab.submit()
        tab.see(".run-title .s-completed")
        assert (again != run_id, records(scenario, "typed-name")) == (True, 2)


@pytest.mark.chaos
def test_the_best_trial_of_a_sweep_from_the_form_is_submitted_as_a_run(scenario: Scenario) -> None:
    with browsing(scenario) as tab:
        tab.open("submit")
        page = tab.page
        page.fill("#submit-yaml", spec(scenario, 0.05, SWEEP))
        tab.see("#submit-go:not([disabled])", "Start sweep")
        sweep_id = tab.submit()
        assert page.url.endswith(f"/sweep/{sweep_id}")
        tab.see(".sweep-title h1", "from-form")
        tab.see(".sweep-title .s-completed")
        tab.see("#sweep-best path.js-line", hidden=True)
        tab.see("#sweep-rows", "3")
        for lr in ("1", "2", "3"):
            tab.see("#sweep-grid .ag-cell[col-id='args.lr']", lr)
        best = str(tab.see("#sweep-best-title", "Best: trial ").inner_text()).split()[-1]
        page.locator("#sweep-best-card a", has_text="Open in Submit").click()
        tab.see_value("#submit-yaml", f"# Trial {best} of ")
        tab.submit()
        tab.see(".run-title .s-completed")
        tab.see(".tile", "0.0625")
        assert records(scenario, "from-form") == 2


@pytest.mark.chaos
def test_a_sweep_is_stopped_resumed_and_cancelled_by_its_buttons(scenario: Scenario) -> None:
    with browsing(scenario) as tab:
        tab.open("submit")
        tab.page.fill("#submit-yaml", spec(scenario, 5, SWEEP))
        tab.see("#submit-go:not([disabled])", "Start sweep")
        tab.submit()
        tab.see(".sweep-title .s-running")
        tab.see("#sweep-grid .ag-cell", "running")
        tab.act(".sweep-title", "Stop", "Stop the sweep from-form?")
        tab.see(".sweep-title .s-paused")
        tab.act(".sweep-title", "Resume", "Resume the sweep from-form?")
        tab.see(".sweep-title .s-running")
        tab.act(".sweep-title", "Cancel", "Cancel the sweep from-form?")
        tab.see(".sweep-title .s-cancelled")
