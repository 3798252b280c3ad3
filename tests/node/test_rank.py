"""The ranks' shim: arguments reach the program byte for byte, through the YAML spec, spec.json, the shim and exec."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node import rank
from hpcaccel.node.allocation import SLOT
from hpcaccel.spec import load_spec
from hpcaccel.submission.entrypoint.entry import find_entry, launch_spec

ROOT = Path(__file__).parents[2]
PIECES = [
    "'",
    '"',
    "\\",
    "$(id)",
    "`id`",
    "${HOME}",
    "~",
    "*",
    "#",
    " ",
    "\t",
    "-n",
    "--",
    "=",
    ":",
    "{python}",
    "é",
    "😀",
]

# ${env:NAME} and a leading ~/ are the two things that a spec expands.
words = (
    st.lists(st.one_of(st.sampled_from(PIECES), st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\r")))
    .map("".join)
    .filter(lambda word: "${env:" not in word and not word.startswith("~/"))
)


@pytest.fixture(scope="module")
def arrives(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], list[str]]:
    """Function that returns the arguments that a rank's program gets for those in a spec file."""
    folder = tmp_path_factory.mktemp("it's 50% of $HOME")
    (folder / "program.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    run = RunDir(folder / "run")
    run.create()

    def send(arguments: list[str]) -> list[str]:
        document = {"name": "x", "entrypoint": {"script": "program.py", "args": arguments}, "code": {"copy": False}}
        (folder / "job.yaml").write_text(yaml.safe_dump(document))
        spec = load_spec(folder / "job.yaml")
        entry = find_entry(spec, base=folder, workdir=folder)
        launch = launch_spec(spec, entry=entry, plan=None, code=run.code, workdir=folder, backend="local")
        write_json(run.spec, {"spec": spec.model_dump(mode="json"), "launch": launch.to_dict()}, sync=False)
        rank = subprocess.run(
            [sys.executable, "-m", "hpcaccel.node", "rank", str(run.path)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "HPCACCEL_ATTEMPT": "1"},
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        value: list[str] = json.loads(rank.stdout)
        return value

    return send


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.lists(words, max_size=6))
@example(arguments=["", "-x", "--", "#", " ", "~", "null", "0123", "yes", "x" * 10_000, "".join(PIECES) * 300])
def test_arguments_arrive_byte_for_byte(arrives: Callable[[list[str]], list[str]], arguments: list[str]) -> None:
    assert arrives(arguments) == arguments


def test_the_shim_imports_what_each_rank_needs_and_no_more() -> None:
    code = "import sys, hpcaccel.node.rank; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "hpcaccel.core.launch_spec" in loaded
    allocation = ("hpcaccel.node.allocation", "hpcaccel.node.batch")
    for name in (*allocation, "hpcaccel.core.records", "ctypes", "socket", "subprocess"):
        assert name not in loaded
    assert rank._SLOT == SLOT
