"""docs/trainers.md: its spec files are valid, and each test that its table names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcaccel.spec import load_spec

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trainers.md").read_text()
SPECS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", SPECS)
def test_spec_of_the_page_is_valid(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "pretrain.sh").touch()
    (tmp_path / "pretrain.sh").chmod(0o755)
    (tmp_path / "job.yaml").write_text(text)
    assert load_spec(tmp_path / "job.yaml").launch_watch("/work") is not None


def test_tests_that_the_table_names_exist() -> None:
    assert len(SPECS) >= 3
    files = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    assert len(files) >= 8
    assert [file for file in files if not (ROOT / file).is_file()] == []
    sources = "".join((ROOT / file).read_text() for file in files)
    names = re.findall(r"`(test_\w+)`", PAGE)
    assert [name for name in names if f"def {name}(" not in sources] == []
    noted = set(re.findall(r"\[(\d+)\]", PAGE))
    assert noted == set(re.findall(r"^(\d+)\. ", PAGE, re.MULTILINE))
