from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("SLURM_", "HPCACCEL_", "ACCELERATE_", "FSDP_", "PET_", "PMI_", "OMPI_", "MASTER_", "TORCHELASTIC_")


class Launcher:
    """The program, in a folder of its own, with a home without configuration files and a machine without GPUs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        self.programs.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OUTSIDE)}
        for name in ("CUDA_VISIBLE_DEVICES", "HF_HOME", "XDG_CACHE_HOME", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE"):
            kept.pop(name, None)
        path = f"{self.programs}:{os.environ['PATH']}"
        self.env = {**kept, "HOME": str(folder), "PYTHONPATH": str(ROOT), "PATH": path}
        self.started: list[subprocess.Popen[str]] = []
        self.python = sys.executable

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def program(self, name: str, script: str) -> None:
        """Put a program on PATH."""
        self.write(f"bin/{name}", f"#!/bin/bash\n{script}\n").chmod(0o755)

    @staticmethod
    def free_port() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    def gpus(self, count: int) -> None:
        """An nvidia-smi that lists this many GPUs."""
        self.program("nvidia-smi", "\n".join(f"echo 'GPU {number}: a stand-in'" for number in range(count)))

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hpcaccel", "launch", *words]
        return subprocess.run(
            command, cwd=self.folder, env={**self.env, **env}, capture_output=True, text=True, timeout=120, check=False
        )

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        """Start the launcher; the test's end kills it."""
        process = subprocess.Popen(
            [sys.executable, "-m", "hpcaccel", "launch", *words],
            cwd=self.folder,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


@pytest.fixture
def script_and_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with an empty script ``t.py``, and an srun on PATH."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    (tmp_path / "srun").write_text("#!/bin/bash\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
