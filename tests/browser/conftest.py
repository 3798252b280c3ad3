"""A service with recorded runs, and a browser that notes errors and requests that leave this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from hpcaccel.service.service_settings import ServiceSettings

from ..service.conftest import TOKEN, serving
from ..test_recorded import Machine
from .chromium import chromium

WAIT = 60_000
"""Longest wait for anything on a page, in milliseconds: machines of tests are busy."""
LARGE = {"width": 1360, "height": 860}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The recorded runs, with an index and a configuration of their own."""
    machine = Machine(tmp_path_factory.mktemp("pages") / "recorded")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("HPCACCEL_", "SLURM_")) and "TEST" not in name]:
            patch.delenv(name)
        patch.setenv("XDG_STATE_HOME", str(machine.folder / "state"))
        patch.setenv("XDG_CONFIG_HOME", str(machine.folder / "config"))
        patch.chdir(machine.folder / "work")
        yield machine


@pytest.fixture(scope="module")
def served(recorded: Machine) -> Iterator[ServiceSettings]:
    """A service of the recorded runs, with its page."""
    settings = ServiceSettings(token=TOKEN, directory=recorded.folder, runs_dir=recorded.folder / "work" / "runs")
    with serving(settings, page=True) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


class Visit:
    """A tab of the browser: what it asked for elsewhere, and its errors."""

    def __init__(self, browser: Any, size: dict[str, int], scheme: str) -> None:
        self.context = browser.new_context(viewport=size, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT)
        self.elsewhere: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", self._asked)
        self.page.on("response", lambda answer: self._answered(answer.status, answer.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)

    def _asked(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1":
            self.elsewhere.append(request.url)

    def _answered(self, status: int, url: str) -> None:
        if status >= 400:
            self.errors.append(f"{status} {url}")

    def open(self, url: str, token: str = TOKEN) -> Any:
        self.page.goto(f"{url}?token={token}" if token else url)
        return self.page

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """``visit(size, scheme)``: a tab without cookies of others."""
    made: list[Visit] = []

    def open_tab(size: dict[str, int] = LARGE, scheme: str = "light") -> Visit:
        made.append(Visit(browser, size, scheme))
        return made[-1]

    yield open_tab
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def pictures() -> Path:
    """Where screenshots are kept, to be looked at; git ignores the folder."""
    folder = Path(__file__).parents[2] / "screenshots"
    folder.mkdir(exist_ok=True)
    return folder
