"""docs/tutorials/first-cluster-job.md, on a real Slurm: its commands run in order, and their output is compared."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_readme import assert_shown
from tests.test_tutorials import commands_of, run, save_files

from .dev_cluster import Cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.torch]

PAGE = "first-cluster-job.md"


def test_first_cluster_job(
    cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = lease(2)
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    save_files("first-run.md", tmp_path)
    save_files(PAGE, tmp_path)
    spec = (tmp_path / "slurm.yaml").read_text()
    assert "epochs: 60" in spec
    python = f"environment: {{python: {sys.executable}}}\n"
    own_nodes = f"  nodelist: [{', '.join(nodes)}]\n"
    (tmp_path / "slurm.yaml").write_text(spec.replace("epochs: 60", "epochs: 20") + own_nodes + python)
    ran = 0
    for command, shown in commands_of(PAGE):
        if command.startswith("hpcaccel status"):
            wait_until(lambda: _steps(tmp_path) > 5, "the run has done some steps")
        answer = run(command.replace("--nodes=2", f"--nodelist={','.join(nodes)}"), tmp_path)
        expected = 2 if "gpuu" in command else 0
        assert answer.returncode == expected, f"$ {command}\n{answer.stdout}"
        assert_shown(re.sub(r"facts of dev, .* old", "facts of dev, less than a minute old", answer.stdout), shown)
        ran += 1
    assert ran == 9


def _steps(folder: Path) -> int:
    answer = run("hpcaccel status preempted --json", folder)
    return (json.loads(answer.stdout).get("step") or 0) if answer.returncode == 0 else 0
