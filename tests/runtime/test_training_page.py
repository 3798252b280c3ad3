"""The programs of docs/training.md run on one rank and on two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .ranks import ROOT, run_ranks

pytestmark = pytest.mark.torch

PAGE = (ROOT / "docs" / "training.md").read_text()
BLOCKS = dict(re.findall(r"^## (.+)\n(?:(?!^## ).*\n)*?```python\n((?:.*\n)*?)```", PAGE, re.M))


def test_all_code_blocks_of_the_page_are_found() -> None:
    assert len(BLOCKS) == PAGE.count("```python") == 7


@pytest.mark.parametrize("size", [1, 2], ids=["1 rank", "2 ranks"])
@pytest.mark.parametrize("title", BLOCKS)
def test_code_block_runs(title: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(BLOCKS[title])
    ended = run_ranks(str(program), size=size)
    assert ended.codes == [0] * size, "\n".join(ended.outputs)
