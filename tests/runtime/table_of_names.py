"""Rows of the table of names (``programs/table``), and the results that ``programs/names.py`` wrote."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from .ranks import PROGRAMS

ROWS = [
    name
    for path in sorted((PROGRAMS / "table").glob("*.py"))
    for name in re.findall(r'^@row\("(.+)"\)$', path.read_text(), flags=re.MULTILINE)
]


@dataclass(frozen=True)
class Results:
    """Results of all ranks; ``said`` is their output."""

    out: Path
    size: int
    said: str

    def check(self, name: str) -> None:
        wrong = {rank: self._wrong(rank, name) for rank in range(self.size)}
        bad = {rank: text for rank, text in wrong.items() if text is not None}
        assert not bad, "\n".join(f"rank {rank}: {text}" for rank, text in bad.items())

    def _wrong(self, rank: int, name: str) -> str | None:
        path = self.out / f"{rank}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        found = [line for line in lines if line["row"] == name]
        if not found:
            return f"never came to this row; the ranks said:\n{self.said[-4000:]}"
        wrong = found[0]["wrong"]
        return None if wrong is None else str(wrong)
