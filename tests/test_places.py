"""docs/places.md and its pages: each page starts with a command, and the commands run on this machine.

In a command for Slurm or for a cluster behind SSH, the cluster is replaced by ``local``; tests/cluster and tests/remote
use real ones. ``srun`` is a stand-in that starts the ranks with Slurm's variables.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.runtime.ranks import free_port, run_ranks
from tests.test_readme import ROOT, blocks, run, script

pytestmark = pytest.mark.torch

DOCS = ROOT / "docs"
INDEX = (DOCS / "places.md").read_text()
ROWS = [line.strip("|").split("|") for line in INDEX.splitlines() if re.match(r"\| .*`.*\]\(.*\) \|$", line)]
PAGES = sorted(set(re.findall(r"\]\(([\w-]+\.md)", INDEX)))

ELSEWHERE = {
    "hpcaccel submit jobs/inference/job.yaml": "tests/integrations/test_inference.py",
    "notebook_launcher(train, num_processes=2)": "tests/runtime/test_notebook.py",
    "hpcaccel config --default": "tests/cli/test_config.py",
    "hpcaccel test": "tests/cli/test_selftest.py",
    'load_checkpoint_and_dispatch(model, folder, device_map="auto")': "tests/runtime/test_offload.py",
    "hpcaccel submit jobs/inference/pipeline.yaml": "tests/integrations/test_pipeline_example.py",
    "hpcaccel launch --parallelism-config-cp-size 4 train.py": "tests/runtime/test_context_parallel.py",
}
"""What needs a package, a model or a kernel, and the test that runs it."""

SRUN = """#!/bin/bash
# Starts 2 ranks on this machine, as a step of a job on one node.
[[ $1 == --ntasks && $2 == 2 ]] || exit 2
shift 2
export SLURM_JOB_ID=PORT SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_NODEID=0
export SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=localhost
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
wait $first && wait $second
"""


def shown() -> list[str]:
    """The commands of the index, and those of the pages for a laptop, torchrun and Slurm."""
    found = [command for row in ROWS for command in re.findall(r"`([^`]+)`", row[1])]
    found += re.findall(r"`(hpcaccel (?:test|config)[^`]*)`", INDEX)
    for page in ("places", "laptop", "torchrun", "slurm"):
        for block in re.findall(r"^```console\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.M | re.S):
            found += re.findall(r"^\$ (.*)$", block, re.M)
    return list(dict.fromkeys(found))


COMMANDS = [command for command in shown() if command not in ELSEWHERE]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script and the spec of the README, with a small data set; ``srun`` is on the PATH."""
    text = script("+").replace("4096", "256")
    ranks = "rank {accelerator.process_index} of {accelerator.num_processes}"
    (tmp_path / "train.py").write_text(f'{text}\nprint(f"trained {{accelerator.step}} steps on {ranks}")\n')
    (tmp_path / "job.yaml").write_text(blocks("yaml")[0])
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN.replace("PORT", str(free_port())))
    (programs / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "HF_HOME", "XDG_CACHE_HOME"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def here(command: str) -> str:
    """The command, with Slurm and other clusters replaced by this machine."""
    return re.sub(r"^(hpcaccel submit \S+)(?: --cluster alps)?(?= --wait)", r"\1 --cluster local", command)


def ranks_of(command: str) -> int:
    """Number of ranks that the command starts: job.yaml asks for two."""
    given = re.search(r"--(?:num-processes|nproc-per-node|ntasks) (\d+)", command)
    nodes = re.search(r"--nnodes (\d+)", command)
    default = 2 if "job.yaml" in command else 1
    return (int(given[1]) if given else default) * (int(nodes[1]) if nodes else 1)


def trained(output: str) -> set[str]:
    """What the ranks have printed; their lines may be mixed."""
    return set(re.findall(r"trained \d+ steps on rank \d+ of \d+", output))


def expected(command: str) -> set[str]:
    size = ranks_of(command)
    steps = 3 * 256 // 32 // size
    return {f"trained {steps} steps on rank {rank} of {size}" for rank in range(size)}


@pytest.mark.chaos
@pytest.mark.parametrize("command", sorted({here(one) for one in COMMANDS if "--nnodes" not in one}))
def test_command_runs(folder: Path, command: str) -> None:
    answer = run(shlex.split(command), folder)
    if "--use-deepspeed" in command and find_spec("deepspeed") is None:
        assert answer.returncode == 1
        assert "pip install deepspeed" in answer.stdout
        return
    assert answer.returncode == 0, answer.stdout
    if re.match(r"hpcaccel (validate|render)", command):
        assert ("job.yaml is valid" in answer.stdout) or "#SBATCH --job-name=first" in answer.stdout
        return
    logs = "".join(path.read_text() for path in folder.glob("runs/first/*/attempts/1/*.log"))
    assert trained(answer.stdout + logs) == expected(command), answer.stdout + logs


@pytest.mark.chaos
def test_torchrun_of_two_nodes_runs(folder: Path) -> None:
    (command,) = [one for one in COMMANDS if "--nnodes" in one]
    words = shlex.split(command.replace("node1:29400", f"127.0.0.1:{free_port()}"))
    words[0] = str(Path(sys.executable).parent / words[0])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    nodes = [
        subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    outputs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert trained("".join(outputs)) == expected(command)


def test_script_with_a_project_dir_saves_on_sigterm_and_continues_at_its_step(folder: Path) -> None:
    """As docs/torchrun.md says of ranks that torchrun has started."""
    project, text = folder / "project", (folder / "train.py").read_text()
    signals = "if accelerator.step == 5 and accelerator.process_index == 1: os.kill(os.getpid(), 15)"
    for first in (True, False):
        changed = text.replace("Accelerator()", f"Accelerator(project_dir={str(project)!r})")
        step = f"accelerator.checkpoint()\n        {signals if first else 'pass'}"
        (folder / "train.py").write_text("import os\n" + changed.replace("accelerator.checkpoint()", step))
        ended = run_ranks(str(folder / "train.py"))
        assert ended.codes == ([85, 85] if first else [0, 0]), ended.outputs
    assert re.search(r"resumed at step [567] from", ended.outputs[0]), ended.outputs
    assert trained("\n".join(ended.outputs)) == expected("--nproc-per-node 2")


def test_enough_commands_are_found() -> None:
    assert len(ROWS) >= 10
    assert len(COMMANDS) >= 10
    unknown = {"notebook_launcher"} & {command.split("(")[0] for command in COMMANDS}
    assert not unknown


@pytest.mark.parametrize("command", ELSEWHERE)
def test_command_that_is_run_elsewhere_is_shown(command: str) -> None:
    assert command in shown()
    assert (ROOT / ELSEWHERE[command]).is_file()


@pytest.mark.parametrize("page", PAGES)
def test_page_of_a_place_exists(page: str) -> None:
    assert (DOCS / page).is_file()


@pytest.mark.parametrize("page", [page for page in ("places.md", *PAGES) if page != "remote.md"])
def test_page_starts_with_a_command(page: str) -> None:
    """A code block right after the heading; a comment, which readers do not see, may say why it is not run."""
    assert re.match(r"# .+\n\n(<!-- .+ -->\n\n)?```(console|python)\n\S", (DOCS / page).read_text())
