"""Every path exists that docs/design.md, CONTRIBUTING.md, SECURITY.md and docs/explanation/guarantees.md name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hpcaccel"
PAGES = ("docs/design.md", "CONTRIBUTING.md", "SECURITY.md", "docs/explanation/guarantees.md")
TOP = ("hpcaccel", "tests", "docs", "docker", "jobs", "templates", "benchmarks", ".ci")
"""First folders of full paths. A path may also begin with a subpackage, such as ``node/attempt.py``."""


def paths(text: str) -> Iterator[str]:
    """Paths of the repository that a page names in backquotes or in its list of folders."""
    roots = {*TOP, *(path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("__"))}
    for quoted in re.findall(r"`([^`\s]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)):
        name = quoted.partition("::")[0].rstrip("/")
        placeholder = re.search(r"[<>*$~|]|NAME|ROOM", name)
        if not placeholder and (name.partition("/")[0] in roots or name.endswith((".py", ".j2"))):
            yield name
    for picture in re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from re.findall(r"^(\S+/)\s", picture, re.MULTILINE)


def exists(name: str) -> bool:
    """Whether a path exists below the root, the package or the runtime's folder."""
    return any((folder / name).exists() for folder in (ROOT, PACKAGE, PACKAGE / "runtime"))


@pytest.mark.parametrize("page", PAGES)
def test_every_path_named_by_the_page_exists(page: str) -> None:
    named = set(paths((ROOT / page).read_text()))
    assert len(named) >= (30 if page == "docs/design.md" else 3), named
    missing = sorted(name for name in named if not exists(name))
    assert not missing, f"{page} names paths that do not exist: {', '.join(missing)}"


def test_every_subpackage_is_listed_in_the_design_page() -> None:
    (picture,) = re.findall(r"^```text\n(.*?)^```", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE | re.DOTALL)
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("__")}
    missing = sorted(room for room in rooms if f"hpcaccel/{room}/" not in picture)
    assert not missing, f"docs/design.md does not show {', '.join(missing)}"
