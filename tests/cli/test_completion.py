"""Shell completion of run names, and ``status --watch``."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.cli.conftest import Shell


def offered(shell: Shell, line: str) -> list[str]:
    """Completions in bash for a command line with the cursor at its end."""
    words = line.split(" ")
    env = {
        **shell.environment,
        "_HPCACCEL_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    said = subprocess.run(
        [sys.executable, "-c", "from hpcaccel.cli.main import main; main()"],
        cwd=shell.folder, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return said.stdout.split()


def test_runs_are_completed_by_name_and_id(shell: Shell) -> None:
    shell.write("train.py", "")
    for name, words in (("gpt", []), ("gpt-best", []), ("other", [])):
        shell.write("job.yaml", f"name: {name}\nentrypoint: {{script: train.py}}\nruntime: {{stop: signals}}\n")
        said = json.loads(shell("submit", "job.yaml", "--cluster", "local", "--json", *words).stdout)
    assert offered(shell, "hpcaccel status g") == ["gpt-best", "gpt"]
    assert offered(shell, f"hpcaccel logs {said['run_id'][:4]}")[0] == said["run_id"]
    assert "other" in offered(shell, "hpcaccel status ")
    assert offered(shell, "hpcaccel sweep status g") == []


def test_status_watch_ends_with_the_run(shell: Shell) -> None:
    shell.write("train.py", "import time; time.sleep(3)")
    shell.write("job.yaml", "name: gpt\nentrypoint: {script: train.py}\nruntime: {stop: signals}\n")
    shell("submit", "job.yaml", "--cluster", "local")
    said = shell("status", "gpt", "--watch")
    assert said.returncode == 0, said.stderr
    pages = said.stdout.split("\nrun ")
    assert len(pages) >= 2
    assert "state       completed" in pages[-1]
