"""The site: its pages are found, their links lead somewhere, and `make docs` builds it without warnings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from hpcaccel_site import expanded
from hpcaccel_site.html_links import broken_links
from hpcaccel_site.project_pages import further_pages, listed_pages, with_links_of_site
from tests.test_readme import ROOT

DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).with_suffix("").as_posix(): path for path in sorted(DOCS.rglob("*.md"))}


def text_of(name: str) -> str:
    """A page as the site has it."""
    folder = PurePosixPath("docs") / PurePosixPath(name).parent
    return expanded(with_links_of_site(PAGES[name].read_text(), folder))


def prose(text: str) -> str:
    """The text without blocks of code."""
    return re.sub(r"^( *)(`{3,})[^`]*?\n.*?^\1\2$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Anchors of headings, as GitHub and MyST make them, and explicit ones."""
    found = set(re.findall(r"\{#([\w-]+)\}", text)) | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))
    for heading in re.findall(r"^#{1,4} (.+)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).replace("`", "").lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return {name: text_of(name) for name in PAGES}


def test_every_page_is_in_a_list_of_pages(texts: dict[str, str]) -> None:
    listed = {"index"}
    for name, text in texts.items():
        if PurePosixPath(name).name == "index":
            listed |= set(listed_pages(text, PurePosixPath(name).parent.as_posix()))
    assert set(texts) == listed


def test_links_between_pages_lead_to_pages_and_anchors(texts: dict[str, str]) -> None:
    known = {name: anchors(text) for name, text in texts.items()}
    wrong = []
    for name, text in texts.items():
        without_code = re.sub(r"(`+)[^`].*?\1", "", prose(text))
        for target in re.findall(r"\]\(([^)\s:]+)\)", without_code):
            path, _, anchor = target.partition("#")
            if not path.endswith(".md") and path:
                continue
            folder = PurePosixPath("" if path.startswith("/") else name).parent
            parts: list[str] = [] if folder.as_posix() == "." else list(folder.parts)
            for part in PurePosixPath(path.lstrip("/")).parts:
                parts = parts[:-1] if part == ".." else [*parts, part]
            page = "/".join(parts).removesuffix(".md") if path else name
            if page not in known or (anchor and page != "reference/api" and anchor not in known[page]):
                wrong.append(f"{name}: {target}")
    assert not wrong


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[a](../README.md#install)", "[a](/project/readme.md#install)"),
        ("[`a[0]`](training.md)", "[`a[0]`](/training.md)"),
        ("[a](../jobs/gpt)", "[a](/project/examples.md#jobs-gpt)"),
        ("[a](../jobs/recipes/verl.yaml)", "[a](/project/examples.md#jobs-recipes-verl-yaml)"),
        ("[a](../jobs/notebook/train.ipynb)", "a"),
        ("[a](https://example.org/x)", "[a](https://example.org/x)"),
        ("[a](#here)", "[a](#here)"),
        ("`[a](../README.md)`", "`[a](../README.md)`"),
        ('<img alt="x" src="pictures/a.svg" width="3">', "![](/pictures/a.svg)"),
    ],
)
def test_link_of_a_page(link: str, shown: str) -> None:
    assert with_links_of_site(f"{link}\n", PurePosixPath("docs")) == f"{shown}\n"


def test_links_in_blocks_of_code_stay() -> None:
    text = "```text\n[a](../README.md)\n```\n"
    assert with_links_of_site(text, PurePosixPath("docs")) == text


def test_pages_without_a_place_are_listed() -> None:
    assert further_pages("reference") == ""


def test_broken_links_of_built_pages_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="#top">x</a><a href="b.html#one">x</a><a href="c.html">x</a>'
        '<a href="b.html#two">x</a><script src="https://cdn.example/x.js"></script><a href="https://example.org/">x</a>'
    )
    (tmp_path / "b.html").write_text('<p id="one"></p>')
    assert list(broken_links(tmp_path)) == [
        "a.html: the link c.html leads to no file",
        "a.html: the link b.html#two leads to no anchor",
        "a.html: https://cdn.example/x.js is fetched from a network",
    ]


@pytest.mark.chaos
def test_site_is_built_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-E", "-W", "--keep-going", "-q", "docs", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert 'id="spec-slurm-nodes"' in (tmp_path / "reference" / "spec.html").read_text()
    assert "hpcaccel.Accelerator.prepare" in (tmp_path / "reference" / "api.html").read_text()
