"""The pages of sweeps and of Submit in a real browser."""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.run_dir import RunDir
from hpcaccel.service.service_settings import ServiceSettings
from hpcaccel.submission.jobs import local
from hpcaccel.sweeps.sweep_handle import Sweep
from tests.browser.swept import swept
from tests.service.conftest import SPEC, TOKEN, serving, until
from tests.slurm.fake_slurm import FakeSlurm
from tests.sweeps.sweeping import SPEC as SWEEP
from tests.sweeps.sweeping import Place

ROOT = Path(__file__).parents[2]
LARGE = SWEEP.replace("name: demo", "name: large").replace("max_trials: 20", "max_trials: 10000")
WAIT = 90_000
"""Longest wait for a condition in the browser, in milliseconds."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ:
            if name.startswith(("HPCACCEL_", "SBATCH_", "SLURM_")) and "TEST" not in name:
                patch.delenv(name)
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("PYTHONPATH", str(ROOT))
        (folder / "project").mkdir()
        patch.chdir(folder / "project")
        yield Place(folder / "project", FakeSlurm())
        for file in (folder / "project" / "runs").rglob("local.json"):
            local.kill(RunDir(file.parent))


@pytest.fixture(scope="module")
def sweep(place: Place) -> Sweep:
    return swept(place)


@pytest.fixture(scope="module")
def service(place: Place, sweep: Sweep) -> Iterator[ServiceSettings]:
    (place.path / "hello.yaml").write_text(SPEC)
    with serving(ServiceSettings(token=TOKEN, directory=place.path, runs_dir=place.runs), page=True) as found:
        yield found


@pytest.fixture
def page(browser: Any, service: ServiceSettings) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1440, "height": 1000}, accept_downloads=True)
    page = context.new_page()
    page.set_default_timeout(WAIT)
    failed: list[str] = []
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto(f"{service.url}/?token={TOKEN}")
    yield page
    context.close()
    assert not failed


def text_of(page: Any) -> str:
    return str(page.input_value("#submit-yaml"))


def has(page: Any, selector: str, text: str) -> None:
    page.locator(selector).filter(has_text=text).first.wait_for(state="attached")


def test_sweep_is_shown_and_its_best_spec_opens_in_submit(page: Any, service: ServiceSettings, sweep: Sweep) -> None:
    page.goto(f"{service.url}/sweeps")
    page.locator(".ag-row a.run-name").first.wait_for()
    page.keyboard.press("j")
    page.locator("#sweeps-grid .ag-cell-focus").wait_for()
    page.keyboard.press("Enter")
    has(page, "#sweep-head h1", "gpt-sweep")
    for name in ("best", "curves", "rungs", "parallel"):
        page.locator(f"#sweep-{name} .main-svg .trace").first.wait_for(state="attached")
    page.locator("#sweep-best path.js-line").first.wait_for(state="attached")
    has(page, "#sweep-best .annotation-text", "budget 8")
    has(page, "#sweep-head", "cuda_out_of_memory")
    has(page, "#sweep-grid .ag-cell", "pruned")
    assert page.locator("#sweep-rows").text_content() == "25"
    page.locator("button", has_text="Cancel").click()
    has(page, ".mantine-Modal-content", "Cancel the sweep gpt-sweep?")
    page.locator("#confirm-no").click()
    has(page, "#sweep-best-yaml", "name: gpt-sweep")
    with page.expect_download() as download:
        page.locator("#sweep-best-file").click()
    assert Path(download.value.path()).read_text() == sweep.best().to_yaml()
    page.locator("text=Open in Submit").click()
    has(page, "#submit-state", "valid")
    page.wait_for_function("document.querySelector('#submit-yaml')?.value?.startsWith('# Trial ')")


@pytest.mark.chaos
def test_ten_thousand_trials(page: Any, service: ServiceSettings, place: Place) -> None:
    (place.path / "sweep.yaml").write_text(LARGE)
    sweep, _ = place.start()
    for path in sweep.dir.path.glob("journal*.jsonl"):
        path.unlink()
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "sweeps" / "reading.py"))
    benchmark["write_journal"](sweep.dir.journal, place.path / "bare.jsonl", 10_000)
    page.goto(f"{service.url}/sweep/{sweep.run_id}")
    has(page, "#sweep-rows", "10,000")
    has(page, "#sweep-numbers, .sweep-numbers", "10000 of 10000")
    page.locator("#sweep-grid .ag-row").first.wait_for()
    assert page.locator("#sweep-grid .ag-row").count() < 100  # the table draws only the rows in sight
    page.locator("#sweep-parallel path.js-line, #sweep-parallel .trace").first.wait_for(state="attached")
    page.locator("#sweep-grid .ag-header-cell[col-id='trial']").click(click_count=2)
    has(page, "#sweep-grid .ag-cell", "9999")


@pytest.mark.chaos
def test_text_is_typed_only_after_the_start_has_arrived(page: Any, service: ServiceSettings) -> None:
    def late(route: Any) -> None:
        if "submit-start.data" in (route.request.post_data or ""):
            page.wait_for_timeout(3000)
        route.continue_()

    page.route("**/_dash-update-component", late)
    page.goto(f"{service.url}/submit")
    page.fill("#submit-yaml", SPEC.replace("name: demo", "name: early"))
    has(page, "#submit-script", "#SBATCH --job-name=early")
    page.locator(".submit-form").wait_for()
    assert text_of(page).startswith("name: early")


def test_form_and_yaml_stay_in_step_and_the_run_is_submitted_once(page: Any, service: ServiceSettings) -> None:
    page.goto(f"{service.url}/submit?file=hello.yaml")
    page.wait_for_function("document.querySelector('#submit-yaml')?.value?.startsWith('name: demo')")
    name = page.locator(".submit-form input").first
    page.wait_for_function("document.querySelector('.submit-form input')?.value === 'demo'")
    has(page, "#submit-script", "#SBATCH --job-name=demo")
    name.fill("from-form")
    name.blur()
    page.wait_for_function("document.querySelector('#submit-yaml')?.value?.startsWith('name: from-form\\n')")
    has(page, "#submit-script", "#SBATCH --job-name=from-form")
    page.fill("#submit-yaml", text_of(page).replace("nodes: 1", "nodes: 1\n  partitoin: gpu"))
    has(page, "#submit-list .is-wrong", "Did you mean 'partition'?")
    has(page, "#submit-gutter .is-wrong", "6")
    assert page.locator("#submit-go").is_disabled()
    page.fill("#submit-yaml", text_of(page).replace("  partitoin: gpu\n", "").replace("nodes: 1", "nodes: 0"))
    has(page, ".submit-form .mantine-InputWrapper-error", "slurm.nodes")
    page.fill("#submit-yaml", text_of(page).replace("nodes: 0", "nodes: 1"))
    has(page, "#submit-state", "valid")
    page.locator("#submit-cluster").click()
    page.locator("[role=option]", has_text="local").click()
    page.wait_for_function("document.querySelector('#submit-go')?.disabled === false")
    page.locator("#submit-go").dblclick()
    has(page, "#submit-run", "Run ")
    with service.client() as client:
        found = [one for one in client.runs(limit=50).runs if one.name == "from-form"]
        assert len(found) == 1
        until(lambda: client.run(found[0].run_id).state == "completed")


def test_spec_files_are_listed_and_others_are_not_read(service: ServiceSettings, place: Place) -> None:
    (place.path / "other.yaml").write_text("secret: 1\n")
    with service.client() as client:
        assert client.spec_files() == ["hello.yaml", "sweep.yaml"]
        assert client.spec_file("hello.yaml") == (SPEC, str(place.path))
        for name in ("other.yaml", "../project/hello.yaml", "/etc/passwd"):
            with pytest.raises(Exception, match="no spec file"):
                client.spec_file(name)
