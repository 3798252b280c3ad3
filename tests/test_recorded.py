"""Directories of an earlier release can be listed, reported, verified, resumed and continued.

``tests/data/record_directories.py`` has recorded them: real trainings and a real sweep, with marks in place of values
of the machine. The output of the commands is compared word for word with recorded output.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "data" / "recorded"
RUNS = ("completed", "stopped", "sharded", "preempted")
"""The last one ran on a real Slurm, where it was preempted and requeued; the others ran without Slurm."""
PAGES = [
    *(("status", name, "--json") for name in (*RUNS, "tuned")),
    *(("report", name, "--json") for name in RUNS),
    *(("checkpoint", "list", name, "--json") for name in RUNS),
    *(("checkpoint", "show", name, "--json") for name in RUNS),
    ("list", "--all", "--json"),
    ("sweep", "status", "tuned", "--json"),
    ("sweep", "table", "tuned", "--json"),
]
"""Commands that only read."""


class Machine:
    """A copy of the recorded directories, as if they had been written in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._marks = {
            b"@FOLDER@": str(folder), b"@PYTHON@": sys.executable, b"@PACKAGE@": str(ROOT),
            b"@HOST@": socket.gethostname(),
        }  # fmt: skip
        for path in sorted(RECORDED.rglob("*")):
            self._copy(path, folder / path.relative_to(RECORDED))
        (folder / "runs").rename(folder / "work" / "runs")
        for run in (folder / "work" / "runs").glob("*/*"):
            (run / "node.pyz").symlink_to(folder / "node.pyz")

    def _copy(self, path: Path, to: Path) -> None:
        if path.is_symlink():
            to.symlink_to(os.readlink(path))
        elif path.is_dir():
            to.mkdir()
        else:
            data = path.read_bytes()
            for mark, meant in self._marks.items():
                data = data.replace(mark, meant.encode())
            to.write_bytes(data)
            os.utime(to, (1_790_000_000, 1_790_000_000))

    def run(self, name: str) -> Path:
        (path,) = (self.folder / "work" / "runs" / name).iterdir()
        return path

    def __call__(self, *arguments: str) -> str:
        return self._started("-m", "hpcaccel", *arguments)

    def python(self, code: str) -> str:
        return self._started("-c", code)

    def _started(self, *arguments: str) -> str:
        places = {"XDG_STATE_HOME": f"{self.folder}/state", "XDG_CONFIG_HOME": f"{self.folder}/config"}
        outside = {key: value for key, value in os.environ.items() if not key.startswith(("HPCACCEL_", "SLURM_"))}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder / "work", capture_output=True, text=True,
            env={**outside, **places, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def anonymous(self, text: str) -> str:
        """Replace values of this machine by the marks."""
        for mark, meant in self._marks.items():
            text = text.replace(meant, mark.decode())
        return text


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "recorded")


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("machine") / "recorded")


def said(machine: Machine, page: tuple[str, ...]) -> Any:
    return json.loads(machine.anonymous(machine(*page)))


@pytest.mark.parametrize("page", PAGES, ids=" ".join)
def test_command_prints_the_recorded_output(looked_at: Machine, page: tuple[str, ...]) -> None:
    kept = RECORDED / "said" / ("-".join(page).replace("-----json", "").replace("---json", "") + ".json")
    found = said(looked_at, page)
    if os.environ.get("HPCACCEL_RECORD"):
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(found, indent=1) + "\n")
    assert found == json.loads(kept.read_text())


def test_every_file_of_a_run_directory_is_listed_in_the_design_page(machine: Machine) -> None:
    """docs/design.md lists the files of a run directory and of a sweep; nothing else is written."""
    page = (ROOT / "docs" / "design.md").read_text()
    for run in (machine.run("completed"), machine.run("stopped"), machine.run("preempted"), machine.run("tuned")):
        for path in run.iterdir():
            assert f"`{path.name}" in page or f"{path.name}`" in page or f"{path.name}/" in page, path.name


@pytest.mark.torch
@pytest.mark.slow
def test_stopped_training_resumes_with_the_same_losses(machine: Machine) -> None:
    machine("resume", "stopped")
    machine("wait", "stopped")
    assert said(machine, ("status", "stopped", "--json"))["state"] == "completed"
    undisturbed, resumed = losses(machine.run("completed")), losses(machine.run("stopped"))
    assert sorted(undisturbed) == list(range(1, 25))
    assert_same(resumed, undisturbed, machine.run("stopped"))


def test_preempted_run_lost_no_step(looked_at: Machine) -> None:
    """Its losses are those of the undisturbed run."""
    run = looked_at.run("preempted")
    lines = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    starts, ends = ([line for line in lines if line["event"] == event] for event in ("start", "end"))
    assert [(end["reason"], end["decision"]) for end in ends] == [("preempted", "requeue"), ("completed", "end")]
    assert [start["attempt"] for start in starts] == [1, 2]
    status = said(looked_at, ("status", "preempted", "--json"))
    assert (status["state"], status["attempts"], status["steps_lost"]) == ("completed", 2, 0)
    assert losses(run) == losses(looked_at.run("completed"))


@pytest.mark.chaos
@pytest.mark.torch
@pytest.mark.slow
def test_sharded_training_resumes_with_the_same_losses(machine: Machine) -> None:
    before = losses(machine.run("sharded"))
    machine("resume", "sharded")
    machine("wait", "sharded")
    after = losses(machine.run("sharded"))
    assert sorted(after) == list(range(1, 25))
    assert_same({step: after[step] for step in before}, before, machine.run("sharded"))


@pytest.mark.chaos
@pytest.mark.torch
@pytest.mark.slow
def test_stopped_sweep_resumes_with_the_same_trials(machine: Machine) -> None:
    pytest.importorskip("optuna")
    before = {trial["trial"]: trial for trial in said(machine, ("sweep", "table", "tuned", "--json"))}
    machine("sweep", "resume", "tuned")
    deadline = time.monotonic() + 240
    while said(machine, ("sweep", "status", "tuned", "--json"))["state"] != "completed":
        assert time.monotonic() < deadline, machine("sweep", "status", "tuned")
        time.sleep(1)
    after = {trial["trial"]: trial for trial in said(machine, ("sweep", "table", "tuned", "--json"))}
    assert sorted(after) == [0, 1, 2, 3, 4]
    assert {trial["state"] for trial in after.values()} == {"complete"}
    for number, trial in before.items():
        assert after[number]["args.lr"] == trial["args.lr"]
        if trial["state"] == "complete":
            assert after[number] == trial


@pytest.mark.torch
@pytest.mark.parametrize("name", RUNS)
def test_recorded_checkpoint_is_intact_and_can_be_converted(machine: Machine, name: str) -> None:
    (newest, *_) = sorted((machine.run(name) / "checkpoints").iterdir(), reverse=True)
    machine("checkpoint", "verify", str(newest))
    machine("checkpoint", "convert", str(newest), "out", "--to", "safetensors")
    assert (machine.folder / "work" / "out" / "model.safetensors").stat().st_size > 0


@pytest.mark.torch
def test_recorded_pickles_can_be_loaded(machine: Machine) -> None:
    """submitit's pickles of programs and functions, and the result of a function."""
    code = (
        "import hpcaccel; from pathlib import Path; from submitit.core.utils import DelayedSubmission\n"
        "for path in Path('runs').rglob('*_submitted.pkl'): print(type(DelayedSubmission.load(path).function).__name__)"
        "\nprint(hpcaccel.find_run('function').result())"
    )
    *kinds, result = machine.python(code).split()
    assert sorted(kinds) == ["FunctionCall", *["ProgramStub"] * 5]
    assert result == "42"


def test_modules_that_recorded_runs_start_by_name_exist(machine: Machine) -> None:
    """The chooser in ``sweep.json``, and the module that ranks and other machines start."""
    *_, code = json.loads((machine.run("tuned") / "sweep.json").read_text())["chooser"]
    assert code.endswith("import main; main()"), code
    machine.python(code.removesuffix("; main()"))
    assert importlib.util.find_spec("hpcaccel.checkpoint.formats.__main__") is not None


def assert_same(found: dict[int, float], expected: dict[int, float], run: Path) -> None:
    """Equal bit for bit on a processor of the recorded kind; on another one nearly equal, as the rank's log states."""
    log = (run / "attempts" / "2" / "0.log").read_text()
    other = re.search(r"state-exact \(processor: (.+) at the save, (.+) now\)", log)
    if other is None:
        assert "bit-exact" in log
        assert found == expected
    else:
        assert other[1] != other[2]
        assert found == pytest.approx(expected, rel=1e-4)


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["values"]["loss"] for line in lines}
