"""Every page: pictures in light, dark and on a phone, nothing that scrolls sideways, and every control by keyboard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.service.demo_runs import demo_runs
from hpcaccel.service.service_settings import ServiceSettings

from ..service.conftest import TOKEN, serving
from .conftest import LARGE, PHONE, Visit

pytestmark = pytest.mark.chaos

PAGES = {
    "runs": ("", ".ag-row .run-name"),
    "run-failed": ("run/{failed}", "#run-traceback"),
    "run-live": ("run/{running}", "#curve-0 .scatterlayer path.js-line"),
    "sweeps": ("sweeps", ".ag-row a.run-name"),
    "sweep": ("sweep/{sweep}", "#sweep-parallel .trace, #sweep-parallel path.js-line"),
    "submit": ("submit?run={running}", "#submit-gutter div:nth-child(20)"),
    "error": ("run/20200101-000000-ffff", ".blank"),
    "elsewhere": ("nowhere/at/all", ".blank"),
}
"""Path of each page, and what it shows when it is complete."""
FOCUS = """() => {
    const it = document.activeElement;
    if (!it || it === document.body) return null;
    const looks = (s) => [s.outlineStyle, s.outlineWidth, s.boxShadow, s.borderColor, s.backgroundColor].join();
    const look = (one) => one ? looks(getComputedStyle(one)) : "";
    const around = [it, it.parentElement, it.nextElementSibling, it.closest("label, .mantine-Input-input")];
    const all = () => around.map(look).join("|");
    const focused = all(), outlined = getComputedStyle(it).outlineStyle !== "none";
    it.setAttribute("data-reached", "");
    const name = it.id || it.getAttribute("aria-label") || it.textContent.trim().slice(0, 40) || it.className;
    it.blur();
    const plain = all();
    it.focus({focusVisible: true, preventScroll: true});
    return [name, outlined || focused !== plain];
}"""
"""Marks the focused element; its name, and whether the focus can be seen."""
# Left out: what arrow keys reach, in tables, in groups of radio buttons and inside fields (a chosen option is chosen
# again to clear it).
UNREACHED = """() => [...document.querySelectorAll("a[href], button, input, select, textarea")].filter((one) =>
    one.checkVisibility({checkOpacity: true, checkVisibilityCSS: true}) && one.offsetWidth > 1 && !one.disabled
    && one.type !== "hidden" && !one.closest(".ag-root, .ag-body, .js-plotly-plot")
    && !(one.type === "radio" && !one.checked) && !one.matches(".mantine-Input-wrapper [tabindex='-1']")
    && !one.hasAttribute("data-reached")).map((one) => one.outerHTML.slice(0, 160))"""


@pytest.fixture(scope="module")
def demo() -> Iterator[ServiceSettings]:
    with pytest.MonkeyPatch.context() as patched:
        for name in ("HPCACCEL_RUNS_DIR", "XDG_STATE_HOME"):
            patched.setenv(name, "")  # the demo changes both, and the patch restores them
        with demo_runs() as folder, serving(ServiceSettings(token=TOKEN, runs_dir=folder), page=True) as found:
            yield found


@pytest.fixture(scope="module")
def paths(demo: ServiceSettings) -> dict[str, str]:
    """The path of each page, with a run and a sweep."""
    with demo.client() as client:
        runs = {row.state: row.run_id for row in client.runs().runs}
        sweep = client.sweeps().runs[0].run_id
    return {name: path.format(sweep=sweep, **runs) for name, (path, _) in PAGES.items()}


def open_page(tab: Visit, settings: ServiceSettings, path: str, until: str) -> Any:
    tab.page.set_default_timeout(180_000)
    page = tab.open(f"{settings.url}/{path.replace('?', f'?token={TOKEN}&')}", "" if "?" in path else TOKEN)
    page.locator(until).first.wait_for(state="attached")
    return page


def take(page: Any, size: dict[str, int], path: Path) -> None:
    """A picture of the whole page, also of what is below the window's end."""
    height = page.evaluate(
        "Math.max((document.querySelector('.main') ?? document.body).scrollHeight + 80, innerHeight)"
    )
    page.set_viewport_size({"width": size["width"], "height": min(height, 6000)})
    page.wait_for_timeout(1500)  # until tables and figures have their new size
    page.screenshot(path=path)


@pytest.mark.parametrize(
    ("scheme", "size"),
    [("light", LARGE), ("dark", LARGE), ("light", PHONE), ("dark", PHONE)],
    ids=["light", "dark", "phone", "dark-phone"],
)
def test_pictures(
    demo: ServiceSettings,
    paths: dict[str, str],
    visit: Callable[..., Visit],
    pictures: Path,
    scheme: str,
    size: dict[str, int],
) -> None:
    sideways, tab = {}, visit(size, scheme)
    for name, (_, until) in PAGES.items():
        tab.page.set_viewport_size(size)
        page = open_page(tab, demo, paths[name], until)
        take(page, size, pictures / f"{name}-{scheme}-{'phone' if size is PHONE else 'large'}.png")
        sideways[name] = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert {name: pixels for name, pixels in sideways.items() if pixels} == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_without_runs(
    tmp_path: Path, visit: Callable[..., Visit], pictures: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with serving(ServiceSettings(token=TOKEN, runs_dir=tmp_path / "runs"), page=True) as nothing:
        tab = visit(LARGE, scheme)
        for name in ("", "sweeps"):
            page = open_page(tab, nothing, name, ".blank")
            assert page.locator(".blank").inner_text().strip()
            take(page, LARGE, pictures / f"empty-{name or 'runs'}-{scheme}-large.png")


@pytest.mark.parametrize("name", ["runs", "run-live", "sweeps", "sweep", "submit"])
def test_every_control_is_reached_by_keyboard(
    demo: ServiceSettings, paths: dict[str, str], visit: Callable[..., Visit], name: str
) -> None:
    page = open_page(visit(), demo, paths[name], PAGES[name][1])
    invisible, first = [], None
    for _ in range(400):
        page.keyboard.press("Tab")
        found = page.evaluate(FOCUS)
        if found is None or found == first:  # around once
            break
        first = first or found
        if not found[1]:
            invisible.append(found[0])
    assert page.evaluate(UNREACHED) == []
    assert invisible == []
