"""Pages of the documentation in the terminal: ``hpcaccel docs TOPIC``."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import hpcaccel
from hpcaccel.core.formatting import did_you_mean
from hpcaccel.errors import UserError

__all__ = ["show_page", "titles"]

_PACKAGE = Path(hpcaccel.__file__).parent
_PLACES = (_PACKAGE / "docs", _PACKAGE.parent / "docs")
"""In the installed package, and in a checkout."""
_MADE = re.compile(r"^<!-- generated:|^```\{(?:toctree|include)\}", re.MULTILINE)
"""What only the site fills in."""
_SKILL = "skill"


def titles() -> dict[str, str]:
    """The topics, each with the title of its page."""
    found = {_SKILL: "For coding agents"}
    for topic, path in sorted(_pages().items()):
        text = path.read_text(encoding="utf-8")
        if not _MADE.search(text):
            found[topic] = text.partition("\n")[0].removeprefix("# ").strip()
    return found


def _pages() -> dict[str, Path]:
    for place in _PLACES:
        if (place / "failures.md").is_file():
            paths = [path for path in place.rglob("*.md") if path.name != "index.md"]
            return {path.stem: path for path in sorted(paths, key=lambda path: -len(path.parts))}
    raise UserError(f"this installation has no pages in {_PLACES[0]}: install the wheel of hpcaccel, or a checkout")


def page_of(topic: str) -> Path:
    """The file of a topic.

    Raises:
        UserError: there is no such page; the message names the closest one.
    """
    name = topic.removesuffix(".md").rpartition("/")[2].lower()
    if name == _SKILL:
        return _PACKAGE / "SKILL.md"
    known = titles()
    if name not in known:
        hint = did_you_mean(name, known) or "."
        raise UserError(f"there is no page {topic!r}{hint} `hpcaccel docs` lists all pages")
    return _pages()[name]


def show_page(topic: str | None) -> None:
    """Print or page through the page of a topic; without a topic, print the list of pages.

    Raises:
        UserError: there is no such page.
    """
    if topic is None:
        known = titles()
        width = max(map(len, known))
        sys.stdout.write("".join(f"{name:{width}}  {title}\n" for name, title in known.items()))
        return
    text = page_of(topic).read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    _show(text)


def _show(text: str) -> None:
    """The page as formatted text, in the user's pager if there is one."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(highlight=False, width=min(shutil.get_terminal_size().columns, 100))
    with console.capture() as captured:
        console.print(Markdown(text, hyperlinks=False))
    pager = shlex.split(os.environ.get("PAGER") or "less")
    if shutil.which(pager[0]) is None:
        sys.stdout.write(captured.get())
        return
    env = {"LESS": "-FRX", **os.environ}
    try:
        subprocess.run(pager, input=captured.get(), text=True, env=env, check=False)
    except BrokenPipeError:
        return  # the reader has left before the end
