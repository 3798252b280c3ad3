"""Check of the built pages: every relative link has a file, and every anchor an element with that id."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["broken_links"]

_NETWORK = ("link", "script", "img", "source", "iframe")
"""Elements whose target the browser fetches: none may be on another host."""


class _Page(HTMLParser):
    """The links and ids of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[tuple[str, str]] = []
        """Element and target."""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {value for name in ("id", "name") if (value := given.get(name))}
        for name in ("href", "src"):
            if (target := given.get(name)) and not (tag == "link" and given.get("rel") == "canonical"):
                self.links.append((tag, target))


def broken_links(folder: Path) -> Iterator[str]:
    """A sentence for each link of the pages below ``folder`` whose target is missing or is fetched from a network."""
    found = sorted(
        path for path in Path(folder).rglob("*.html") if "_static" not in path.parts
    )  # the theme's templates
    pages = {path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in found}
    for path, page in pages.items():
        for tag, target in page.links:
            parts = urlsplit(target)
            where = path.relative_to(Path(folder).resolve())
            if parts.scheme or parts.netloc:
                if tag in _NETWORK and parts.scheme != "data":
                    yield f"{where}: {target} is fetched from a network"
                continue
            file = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if not file.exists():
                yield f"{where}: the link {target} leads to no file"
            elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].ids:
                yield f"{where}: the link {target} leads to no anchor"
