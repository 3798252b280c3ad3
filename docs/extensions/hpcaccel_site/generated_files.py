"""Writes the files that are made from the code: the man pages, the table of shell completion, the site's drawings."""

from __future__ import annotations

from pathlib import Path

from hpcaccel_site.completion_table import completion_table
from hpcaccel_site.explanation_drawings import explanation_drawings
from hpcaccel_site.man_pages import man_pages

__all__ = ["generated_files"]

ROOT = Path(__file__).resolve().parents[3]


def generated_files() -> dict[Path, str]:
    """The contents of each file, by its path."""
    pages = {ROOT / "man" / f"{name}.1": text for name, text in man_pages().items()}
    return {ROOT / "hpcaccel" / "cli" / "completion.json": completion_table(), **pages, **explanation_drawings()}


def main() -> None:
    """Write the files, and remove man pages of commands that are gone."""
    files = generated_files()
    for path in set((ROOT / "man").glob("*.1")) - set(files):
        path.unlink()
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
