"""The pages of runs in a real browser: recorded runs, the dialog before each action, cut links, proxies, many rows."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.service.service_settings import ServiceSettings

from ..service.conftest import TOKEN, serving
from ..test_recorded import Machine
from .conftest import Visit
from .tunnel import tunnel

Visits = Callable[..., Visit]


def test_runs_and_a_run_are_shown_without_a_request_elsewhere(served: ServiceSettings, visit: Visits) -> None:
    tab = visit()
    page = tab.open(f"{served.url}/")
    page.locator(".ag-row .run-name", has_text="preempted").wait_for()
    assert page.locator("#runs-total").inner_text() == "6"
    assert "token" not in page.url
    page.locator(".filter input").fill("preem")
    page.wait_for_function("document.querySelectorAll('.ag-center-cols-container .ag-row').length === 1")
    page.locator(".run-name").click()
    page.locator(".life-part.p-training").first.wait_for()
    assert page.url.startswith(f"{served.url}/run/")
    assert page.locator(".run-title h1").inner_text() == "preempted"
    assert page.locator("#run-attempts tbody tr").count() == 2
    assert page.locator(".cell").count() == 2
    page.locator("#curve-0 .scatterlayer path.js-line").first.wait_for()
    page.locator("#run-log", has_text="resumed at step 9").wait_for()
    page.locator("#run-tab label", has_text="Script").click()
    page.locator("#run-text pre", has_text="#SBATCH").wait_for()
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.locator("#runs-grid").wait_for()
    assert (tab.elsewhere, tab.errors) == ([], [])


def test_actions_ask_first_and_colours_are_remembered(served: ServiceSettings, visit: Visits) -> None:
    tab = visit()
    page = tab.open(f"{served.url}/")
    for name in ("stopped", "sharded"):
        row = page.locator(".ag-row", has=page.locator(".run-name span", has_text=name))
        row.locator(".ag-selection-checkbox").click()
    page.locator("#runs-bulk").wait_for(state="visible")
    page.locator("#runs-chosen", has_text="2 runs").wait_for()
    page.locator("#runs-bulk button", has_text="Resume").click()
    dialog = page.get_by_role("dialog", name="Resume 2 runs?")
    dialog.wait_for()
    assert dialog.locator("li").count() == 2
    dialog.get_by_text("Keep as it is").click()
    dialog.wait_for(state="hidden")
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog", name="Keys").wait_for(state="hidden")
    page.locator("#scheme").click()
    page.wait_for_function("document.documentElement.dataset.mantineColorScheme === 'dark'")
    page.reload()
    page.locator(".ag-row .run-name").first.wait_for()
    assert page.evaluate("document.documentElement.dataset.mantineColorScheme") == "dark"
    assert (tab.elsewhere, tab.errors) == ([], [])


@pytest.mark.chaos
def test_a_page_is_current_again_after_a_minute_without_a_link(
    served: ServiceSettings, recorded: Machine, visit: Visits
) -> None:
    with tunnel(served.port) as link:
        page = visit().open(f"http://127.0.0.1:{link.port}/")
        page.locator(".ag-row .run-name", has_text="stopped").wait_for()
        page.evaluate("window.sameDocument = true")
        link.cut()
        page.locator("#offline", has_text="Not connected since").wait_for()
        began = time.monotonic()
        added = add_runs(recorded.folder / "work" / "runs", recorded.run("completed"), ["meanwhile"])
        try:
            page.wait_for_timeout(60_000 - 1000 * (time.monotonic() - began))
            assert page.locator(".ag-row .run-name", has_text="stopped").is_visible()
            link.mend()
            page.locator(".ag-row .run-name", has_text="meanwhile").wait_for()
            assert page.locator("#offline").is_hidden()
            assert page.evaluate("window.sameDocument"), "the page was loaded again"
        finally:
            for folder in added:
                shutil.rmtree(folder.parent)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("base", "strip", "front"),
    [
        ("/node/n1/8000", "", "/node/n1/8000"),  # the whole path arrives
        ("/rnode/n1/8000", "/rnode/n1/8000", "/rnode/n1/8000"),  # the proxy removes it
        ("", "/rnode/n1/8000", "/rnode/n1/8000"),  # and the service does not know of it
    ],
)
def test_pages_work_behind_the_proxy_of_open_ondemand(
    recorded: Machine, visit: Visits, base: str, strip: str, front: str
) -> None:
    settings = ServiceSettings(token=TOKEN, runs_dir=recorded.folder / "work" / "runs", base_path=base)
    with serving(settings, page=True) as service, tunnel(service.port, strip) as proxy:
        tab = visit()
        page = tab.open(f"http://127.0.0.1:{proxy.port}{front}/")
        page.locator(".ag-row .run-name", has_text="preempted").click()
        page.locator(".life-part").first.wait_for()
        page.reload()  # a deep link
        page.locator(".life-part").first.wait_for()
        assert page.url.startswith(f"http://127.0.0.1:{proxy.port}{front}/run/")
        page.go_back()
        page.locator(".ag-row .run-name").first.wait_for()
        assert (tab.elsewhere, tab.errors) == ([], [])


@pytest.mark.chaos
def test_ten_thousand_runs(recorded: Machine, tmp_path: Path, visit: Visits) -> None:
    runs = tmp_path / "runs"
    add_runs(runs, recorded.run("completed"), [f"many-{number:05}" for number in range(10_000)])
    with serving(ServiceSettings(token=TOKEN, runs_dir=runs), page=True) as service:
        tab = visit()
        page = tab.open(f"{service.url}/")
        page.locator("#runs-total", has_text="10000").wait_for(timeout=300_000)
        page.locator("#runs-page button", has_text="100").click()
        page.locator("#runs-range", has_text="9901 to 10000 of 10000").wait_for()
        page.locator(".filter input").fill("many-07777")
        page.locator(".ag-row .run-name", has_text="many-07777").wait_for()
        page.locator("#runs-range", has_text="1 to 1 of 1").wait_for()
        assert tab.errors == []


def add_runs(runs: Path, like: Path, names: list[str]) -> list[Path]:
    """Ended runs in ``runs``, copies of ``like`` without its logs and checkpoints."""
    record = json.loads((like / "record.json").read_text())
    made = []
    for number, name in enumerate(names):
        run_id = f"20261125-{number // 10000:06}-{number % 10000 + 4096:04x}"
        folder = runs / name / run_id
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps({**record, "run_id": run_id, "name": name}))
        for file in ("attempts.jsonl", "spec.json", "local.json"):
            if (like / file).exists():
                shutil.copy(like / file, folder / file)
        made.append(folder)
    return made
