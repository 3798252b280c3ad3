"""docs/checkpoints.md: its commands print what the page shows, and its training loops resume."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import read_json
from tests.runtime.ranks import make_run, metrics, run_ranks
from tests.test_readme import ROOT, assert_shown, run

pytestmark = pytest.mark.torch

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "docs" / "checkpoints.md").read_text(), re.MULTILINE | re.DOTALL)


def test_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    by_language = {language: text for language, text in reversed(BLOCKS) if language != "console"}
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


SAID = ["state-exact (no DataLoader was prepared", "bit-exact"]
LOOPS = [text for language, text in BLOCKS if language == "python"][1:]


@pytest.mark.parametrize(("loop", "said"), list(zip(LOOPS, SAID, strict=True)))
def test_loops_of_the_page_resume_with_the_same_metrics(tmp_path: Path, loop: str, said: str) -> None:
    killed_at = (
        "    if accelerator.step == 8 and os.environ['HPCACCEL_ATTEMPT'] == '1':\n        os.kill(os.getpid(), 9)\n"
    )
    (tmp_path / "whole.py").write_text(loop)
    (tmp_path / "killed.py").write_text(f"import os\n{loop}{killed_at}")
    schedule = {"every_steps": 5, "background": False}
    whole, killed = (make_run(tmp_path / name, checkpoint=schedule) for name in ("whole", "killed"))
    assert run_ranks(str(tmp_path / "whole.py"), size=1, run=whole).codes == [0]
    assert run_ranks(str(tmp_path / "killed.py"), size=1, run=killed).codes == [-9]
    second = run_ranks(str(tmp_path / "killed.py"), size=1, run=killed, attempt=2)
    assert second.codes == [0], second.outputs[0]
    assert f"resumed at step 5 from {killed.checkpoints / 'step_00000005'}, {said}" in second.outputs[0]
    newest = max(killed.checkpoints.glob("step_*"))
    assert said.startswith(read_json(newest / "COMMITTED")["guarantee"])
    assert metrics(killed) == metrics(whole)
    assert len(metrics(whole)) == 20
