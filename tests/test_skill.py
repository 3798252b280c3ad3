"""hpcaccel/SKILL.md: its commands run on the local backend, in their order, and print the keys that it names."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_readme import ROOT, run

SKILL = (ROOT / "hpcaccel" / "SKILL.md").read_text()
COMMANDS = re.findall(r"^\$ (.*)$", SKILL, re.M)
JOB, SWEEP = re.findall(r"^```yaml\n(.*?)^```", SKILL, re.M | re.S)

OTHER = (
    "name: {name}\nentrypoint: {{script: {name}.py}}\nslurm: {{ntasks_per_node: 1}}\nruntime: {{stop: signals}}\n{more}"
)
"""Runs that the page assumes: one that fails, and one that takes long."""
PROGRAMS = {
    "train.py": "print('hello')\n",
    "objective.py": "import hpcaccel, sys\nhpcaccel.log({'loss': float(sys.argv[2])}, step=1)\n",
    "failing.py": "import absent_package\n",
    "long.py": "import pathlib, time\nonce = pathlib.Path('once')\nif not once.exists():\n    once.touch()\n"
    "    time.sleep(300)\n",
}
EXIT_CODES = {"hpcaccel wait long": 85}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name, text in {**PROGRAMS, "job.yaml": JOB, "sweep.yaml": SWEEP}.items():
        (tmp_path / name).write_text(text)
    for name, more in (("failing", "resilience: {max_failures: 1, restart_in_place: 0}\n"), ("long", "")):
        (tmp_path / f"{name}.yaml").write_text(OTHER.format(name=name, more=more))
        answer = run(["hpcaccel", "submit", f"{name}.yaml", "--cluster", "local"], tmp_path)
        assert answer.returncode == 0, answer.stdout
    assert run(["hpcaccel", "wait", "failing"], tmp_path).returncode == 1
    return tmp_path


def document(output: str) -> dict[str, Any]:
    """The JSON in an output that may have notes around it."""
    start = min(at for at in (output.find("{"), output.find("[")) if at >= 0)
    return json.JSONDecoder().raw_decode(output[start:])[0]


def test_commands_of_the_page_run_and_print_what_it_names(folder: Path) -> None:
    said: dict[str, Any] = {}
    for command in COMMANDS:
        answer = run(shlex.split(command), folder)
        assert answer.returncode == EXIT_CODES.get(command, 0), f"{command}\n{answer.stdout}"
        said[command] = document(answer.stdout) if "--json" in command else answer.stdout
    assert said["hpcaccel validate job.yaml --cluster local --json"]["valid"] is True
    assert {"run_id", "job_id", "path"} <= said["hpcaccel submit job.yaml --cluster local --json"].keys()
    status = said["hpcaccel status hello --json"]
    assert status["state"] == "completed"
    assert {"step", "total_steps", "attempts", "checkpoint", "detail", "advice"} <= status.keys()
    failed = said["hpcaccel status failing --json"]
    assert (failed["state"], failed["error_class"]) == ("failed", "import_error")
    assert "hello" in said["hpcaccel logs hello"]
    assert "args:" in said["hpcaccel sweep best search"]
    assert run(["hpcaccel", "wait", "long"], folder).returncode == 0


def test_problems_of_a_wrong_file_are_listed_as_the_page_says(folder: Path) -> None:
    (folder / "wrong.yaml").write_text(JOB.replace("nodes: 1", "nodse: 1"))
    answer = run(["hpcaccel", "validate", "wrong.yaml", "--cluster", "local", "--json"], folder)
    assert answer.returncode == 2
    found = document(answer.stdout)
    assert found["valid"] is False
    assert "wrong.yaml:5" in found["problems"][0]


def test_page_is_shown_by_docs_and_has_a_skills_header() -> None:
    answer = run([sys.executable, "-m", "hpcaccel", "docs", "skill"], ROOT)
    assert answer.stdout == SKILL
    assert re.match(r"---\nname: hpcaccel\ndescription: .+\n---\n", SKILL)
