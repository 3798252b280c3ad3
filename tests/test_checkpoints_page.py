"""The commands of docs/checkpoints.md run, and print what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.test_readme import ROOT, assert_shown, run

pytestmark = pytest.mark.torch

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "docs" / "checkpoints.md").read_text(), re.MULTILINE | re.DOTALL)


def test_the_commands_print_what_is_shown(tmp_path: Path) -> None:
    by_language = {language: text for language, text in BLOCKS if language != "console"}
    (tmp_path / "train.py").write_text(by_language["python"])
    (tmp_path / "job.yaml").write_text(by_language["yaml"])
    ran = 0
    for block in [text for language, text in BLOCKS if language == "console"]:
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            answer = run(shlex.split(command), tmp_path)
            assert answer.returncode == 0, (command, answer.stdout)
            assert_shown(answer.stdout, shown)
            ran += 1
    assert ran >= 10
