"""Markdown text of the generated parts: tables, escaped text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["code", "plain", "table"]

_CODE = re.compile(r"(`+)(.+?)\1")


def plain(text: str) -> str:
    """Text with backquotes as Markdown on one line: other characters with a meaning in Markdown are escaped."""
    text = " ".join(text.split())
    parts, end = [], 0
    for found in _CODE.finditer(text):
        parts += [_escaped(text[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*parts, _escaped(text[end:])])


def _escaped(text: str) -> str:
    return re.sub(r"(?<!\\)([\\*<>\[\]{}$]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def code(text: str) -> str:
    """``text`` as inline code, whatever backquotes it contains."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the cells are Markdown without line breaks."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
