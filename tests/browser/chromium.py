"""A headless Chromium for the tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAM = "/usr/bin/chromium"


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser. Without Debian's Chromium or Playwright the test is skipped."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the tests of the page need Playwright")
    if not Path(PROGRAM).exists():
        pytest.skip(f"the tests of the page need {PROGRAM}: apt-get install chromium")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
