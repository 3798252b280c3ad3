"""The wheel: it contains all that it needs, and runs from an empty folder in an environment without torch."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

import hpcaccel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
DIST_INFO = f"hpcaccel-{hpcaccel.__version__}.dist-info"

Result = subprocess.CompletedProcess

SHELL_JOB = """\
name: hello
entrypoint: {command: [bash, -c, "echo rank $RANK of $WORLD_SIZE"]}
slurm: {ntasks_per_node: 2, time: "10:00"}
"""

TRAINING = """\
name: train
entrypoint: {script: train.py}
slurm: {ntasks_per_node: 1, time: "10:00"}
resilience: {restart_in_place: 0, max_failures: 1}
"""

FUNCTION = """\
import hpcaccel

def double(number):
    return 2 * number

if __name__ == "__main__":
    run = hpcaccel.submit(double, 21, spec={"name": "double", "slurm": {"ntasks_per_node": 1}}, cluster="local")
    print(run.result())
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """`once(name, make)`: a folder that is made once for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                make(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def wheel(once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """Built as pip builds it for a user: in an environment with nothing but the build system."""

    def build(folder: Path) -> None:
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)

    (path,) = once("wheel", build).glob("*.whl")
    return path


class Installed:
    """hpcaccel in its own environment, used from an empty folder."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self.bin = environment / "bin"
        self.folder = folder / "empty"
        self.folder.mkdir()
        self.env = {"HOME": str(folder), "PATH": f"{self.bin}:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}

    def run(self, program: str, *arguments: str) -> Result[str]:
        return subprocess.run(
            [self.bin / program, *arguments],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def __call__(self, *arguments: str) -> str:
        """Output of a command, which must succeed."""
        done = self.run("hpcaccel", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)


@pytest.fixture
def installed(wheel: Path, once: Callable[[str, Callable[[Path], None]], Path], tmp_path: Path) -> Installed:
    def install(folder: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        python = folder / "bin" / "python"
        run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", wheel)

    return Installed(once("environment", install), tmp_path)


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_contains_the_package_its_templates_pages_and_man_pages(wheel: Path) -> None:
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "hpcaccel").rglob("*.py")}
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "hpcaccel/service/page/assets").iterdir()}
    templates = {f"hpcaccel/{path.relative_to(ROOT)}" for path in (ROOT / "templates").rglob("*") if path.is_file()}
    assert "hpcaccel/templates/sbatch.j2" in templates
    docs = {f"hpcaccel/{path.relative_to(ROOT)}" for path in (ROOT / "docs").rglob("*.md")}
    data = DIST_INFO.replace(".dist-info", ".data/data/share/man/man1")
    man = {f"{data}/{path.name}" for path in (ROOT / "man").iterdir()}
    others = {"py.typed", "service/demo_runs.tar.xz", "SKILL.md", "cli/completion.json"}
    held = {name for name in contents(wheel) if not name.startswith(f"{DIST_INFO}/")}
    assert held == package | page | templates | docs | man | {f"hpcaccel/{name}" for name in others}


def test_wheel_metadata_lists_its_requirements(wheel: Path) -> None:
    said = Parser().parsestr(contents(wheel)[f"{DIST_INFO}/METADATA"].decode())
    assert said["Requires-Python"] == ">=3.10"
    assert set(said.get_all("Provides-Extra", [])) == {
        "train",
        "sweep",
        "plot",
        "trackers",
        "trainers",
        "recipes",
        "ui",
        "mcp",
        "all",
        "bench",
        "docs",
        "dev",
    }
    core = {need.partition(">")[0] for need in said.get_all("Requires-Dist", []) if "extra ==" not in need}
    plain = {"fabric", "jinja2", "nvidia-ml-py", "pydantic", "pyyaml", "questionary", "rich", "submitit", "typer"}
    assert core == plain


def test_source_archive_builds_the_same_wheel(tmp_path: Path) -> None:
    version = f"hpcaccel-{hpcaccel.__version__}"
    checkout, unpacked = tmp_path / "checkout", tmp_path / version
    build = (sys.executable, "-m", "hatchling", "build")
    run(*build, "--target", "sdist", "--target", "wheel", "--directory", checkout, cwd=ROOT)
    run("tar", "--extract", "--file", checkout / f"{version}.tar.gz", "--directory", tmp_path)
    run(*build, "--target", "wheel", cwd=unpacked)
    wheel = f"{version}-py3-none-any.whl"
    assert contents(unpacked / "dist" / wheel) == contents(checkout / wheel)


def test_installed_commands_for_specs_run(installed: Installed) -> None:
    assert installed("--version") == f"hpcaccel {hpcaccel.__version__}\n"
    assert "submit" in installed("--help")
    assert "entrypoint" in json.loads(installed("schema"))["properties"]

    installed("init")
    assert "is valid" in installed("validate", "job.yaml")

    installed.write("hello.yaml", SHELL_JOB)
    assert "#SBATCH --ntasks-per-node=2" in installed("render", "hello.yaml").splitlines()

    assert "checkpoints  " in installed("docs")
    assert installed("docs", "skill").startswith("---\nname: hpcaccel\n")
    assert (installed.bin.parent / "share" / "man" / "man1" / "hpcaccel-submit.1").is_file()


def test_program_runs_to_completion_from_the_installed_wheel(installed: Installed) -> None:
    installed.write("hello.yaml", SHELL_JOB)
    assert "hello" in installed("submit", "hello.yaml", "--cluster", "local", "--wait")
    assert json.loads(installed("status", "hello", "--json"))["state"] == "completed"
    assert [run["name"] for run in json.loads(installed("list", "--json"))] == ["hello"]
    assert installed("logs", "hello") == "rank 0 of 2\n"


def test_python_function_returns_its_result_from_the_installed_wheel(installed: Installed) -> None:
    installed.write("double.py", FUNCTION)
    done = installed.run("python", "double.py")
    assert done.stdout == "42\n", done.stderr


def test_training_without_torch_names_the_extra_to_install(installed: Installed) -> None:
    """In one sentence, which the status of the run repeats."""
    installed.write("train.py", "from hpcaccel import Accelerator\n")
    installed.write("train.yaml", TRAINING)
    sentence = (
        "ModuleNotFoundError: hpcaccel.Accelerator needs torch, which is not installed for "
        f"{installed.bin / 'python'}: pip install 'hpcaccel[train]'"
    )
    done = installed.run("python", "train.py")
    assert done.stderr.splitlines()[-1] == sentence
    assert "During handling" not in done.stderr

    assert installed.run("hpcaccel", "submit", "train.yaml", "--cluster", "local", "--wait").returncode == 1
    assert installed("logs", "train").splitlines()[-1] == sentence
    status = json.loads(installed("status", "train", "--json"))
    assert status["state"] == "failed"
    assert sentence in status["detail"]
