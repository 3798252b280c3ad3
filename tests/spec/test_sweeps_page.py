"""The sweep files shown in docs/sweeps.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcaccel.spec import load_sweep
from hpcaccel.spec.sweep.points import notes
from hpcaccel.spec.sweep.sweep_fields import METHODS

PAGE = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
FILES = [text for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if "\nsweep:" in text]


@pytest.mark.parametrize("text", FILES)
def test_sweep_files_in_the_docs_are_valid(text: str) -> None:
    Path("job.yaml").write_text("name: gpt\nentrypoint: {script: train.py, args: {lr: 1.0e-3}}\n")
    Path("sweep.yaml").write_text(text)
    assert notes(load_sweep("sweep.yaml")) == []


def test_docs_list_every_search_method() -> None:
    assert len(FILES) == 4
    assert [name for name in METHODS if f"\n| `{name}`" not in PAGE] == []
