"""A browser on the pages of ``hpcaccel serve`` that runs beside a real Slurm."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..browser.chromium import chromium
from .scenario import Scenario

WAIT = 180_000
"""Longest wait for a step of a scenario, in milliseconds."""
SPEC = """\
# A job of the development cluster.
name: NAME
entrypoint: {script: descends.py, args: {lr: 1.0, seconds: SECONDS}}
slurm:
  partition: gpu
  nodes: 1
  ntasks_per_node: 1
  mem: 200M
  time: 5
  nodelist: NODE
runtime: {stop: signals}
resilience: {preflight: "off"}
"""
SWEEP = """\
sweep:
  method: grid
  metric: loss
  parameters: {args.lr: {choice: [3.0, 1.0, 2.0]}}
  workers: 1
"""
PICTURES = Path(__file__).parents[2] / "screenshots"


def spec_of(name: str, node: str, *, seconds: float, more: str = "") -> str:
    """A spec of ``descends.py`` on one node, whose steps take ``seconds``; ``more`` is appended."""
    return SPEC.replace("NAME", name).replace("NODE", node).replace("SECONDS", str(seconds)) + more


class Browsing:
    """A tab on the pages of a scenario's service."""

    def __init__(self, page: Any, link: str) -> None:
        self.page = page
        self.page.set_default_timeout(WAIT)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        parts = urlsplit(link)
        self._origin, self._query = f"{parts.scheme}://{parts.netloc}", parts.query

    def open(self, path: str) -> None:
        """Load a page, such as ``submit?run=ID``."""
        self.page.goto(f"{self._origin}/{path}{'&' if '?' in path else '?'}{self._query}")

    def see(self, selector: str, text: str = "", *, hidden: bool = False) -> Any:
        """Wait until an element that contains ``text`` is shown (with ``hidden``, until it is there); return it."""
        print(f"{time.strftime('%X')} waits for {selector} {text}", flush=True)
        found = self.page.locator(selector)
        found = (found.filter(has_text=text) if text else found).first
        found.wait_for(state="attached" if hidden else "visible")
        return found

    def see_value(self, selector: str, part: str) -> None:
        """Wait until the value of an input contains ``part``."""
        test = "([one, part]) => document.querySelector(one)?.value?.includes(part)"
        self.page.wait_for_function(test, arg=[selector, part])

    def act(self, head: str, label: str, question: str) -> None:
        """Click a button of ``head``, and agree to its question."""
        self.page.locator(f"{head} button", has_text=label).click()
        self.page.get_by_role("dialog", name=question).locator("#confirm-yes").click()

    def submit(self) -> str:
        """Click twice on the button that submits, and open what was submitted; return its id."""
        self.see("#submit-state", "valid")
        self.page.locator("#submit-go").dblclick()
        link = self.see("#submit-run")
        run_id = str(link.inner_text()).split()[-1]
        link.click()
        self.page.wait_for_url(f"**/{run_id}")
        return run_id


@contextmanager
def browsing(scenario: Scenario) -> Iterator[Browsing]:
    """A service in the scenario's folder and environment, and a tab; a failure leaves a screenshot."""
    words = [sys.executable, "-m", "hpcaccel", "serve", "--no-browser"]
    process = subprocess.Popen(words, cwd=scenario.folder, env=scenario.env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        link = process.stdout.readline().strip()
        with chromium() as browser:
            tab = Browsing(browser.new_page(viewport={"width": 1440, "height": 1000}), link)
            try:
                yield tab
            except Exception:
                PICTURES.mkdir(exist_ok=True)
                tab.page.screenshot(path=PICTURES / f"failed-{scenario.folder.name}.png")
                raise
            assert tab.errors == []
    finally:
        process.terminate()
        process.communicate(timeout=60)
