from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

Result = subprocess.CompletedProcess

SPEC = """\
name: hello
entrypoint:
  command: [echo, hello]
slurm:
  nodes: 1
  ntasks_per_node: 1
  time: "10:00"
"""


class Shell:
    """Isolated environment for the ``hpcaccel`` program: work folder, home, and a PATH that the test fills."""

    def __init__(self, folder: Path, system: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.environment = {
            "HOME": str(folder),
            "PATH": f"{self.programs}:{system}",
            "PYTHONPATH": str(ROOT),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "LC_ALL": "C.UTF-8",
        }

    def __call__(self, *arguments: str, python: str = "", input: str | None = None) -> Result[str]:
        command = [sys.executable, *(["-c", python] if python else ["-m", "hpcaccel"]), *arguments]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def program(self, name: str, script: str) -> None:
        """Put a program on the machine's PATH."""
        path = self.programs / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def files(self) -> set[str]:
        """Paths of everything in the work folder."""
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}


SLURM_PROGRAMS = {"sacct", "sacctmgr", "salloc", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun"}


@pytest.fixture(scope="session")
def no_slurm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with links to the system's programs, except Slurm's."""
    folder = tmp_path_factory.mktemp("programs")
    for directory in ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"):
        for program in Path(directory).glob("*"):
            link = folder / program.name
            if program.name not in SLURM_PROGRAMS and not link.is_symlink():
                link.symlink_to(program)
    return folder


@pytest.fixture
def shell(tmp_path: Path, no_slurm: Path) -> Shell:
    return Shell(tmp_path, no_slurm)


@pytest.fixture
def spec(shell: Shell) -> Path:
    return shell.write("job.yaml", SPEC)


def refused(result: Result[str]) -> str:
    """Error message of a command that refused its input: exit code 2, no traceback."""
    assert result.returncode == 2, (result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith(("error: ", "Usage: ")), result.stderr
    return result.stderr


@pytest.fixture(name="refused")
def refused_fixture() -> Callable[[Result[str]], str]:
    return refused
