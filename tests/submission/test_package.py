"""The program of the batch step, node.pyz."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hpcaccel.submission.code.package import build_node_program, write_node_program


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "node.pyz"
    write_node_program(path)
    return path


def test_node_program_runs_without_any_installed_package(program: Path, tmp_path: Path) -> None:
    # -S: no site-packages; -I: ignore PYTHON* variables and the current directory
    command = [sys.executable, "-S", "-I", str(program), "supervise", str(tmp_path / "no-run")]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not the directory of a submitted run" in done.stderr


def test_node_program_contains_only_base_and_batch_step(program: Path) -> None:
    with zipfile.ZipFile(program) as archive:
        names = [name.removesuffix("c") for name in archive.namelist() if name.endswith((".py", ".pyc"))]
    rooms = {name.split("/")[1] for name in names if name.startswith("hpcaccel/")}
    base = {"__init__.py", "errors.py", "core", "checkpoint_files", "slurm"}
    assert rooms == {*base, "node"}


def test_node_program_contains_nvidias_module_for_the_sampler(program: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(program)!r}); import pynvml; print(pynvml.__file__, pynvml.nvmlInit)"
    command = [sys.executable, "-S", "-I", "-c", code]
    assert f"{program}/pynvml.py" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_node_program_uses_bytecode_of_this_python_or_else_source(program: Path) -> None:
    def used() -> str:
        code = (
            f"import sys; sys.path.insert(0, {str(program)!r}); import hpcaccel.core.run_dir as it; print(it.__file__)"
        )
        command = [sys.executable, "-S", "-I", "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert used().endswith("run_dir.pyc")
    magic = importlib.util.MAGIC_NUMBER
    with zipfile.ZipFile(program) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(program, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content.replace(magic, b"\0" * len(magic), 1) if name.endswith("c") else content)
    assert used().endswith("run_dir.py")


def test_node_program_build_is_reproducible(program: Path) -> None:
    assert program.read_bytes() == build_node_program()


def test_node_program_is_executable(program: Path) -> None:
    assert os.access(program, os.X_OK)
    assert program.read_bytes().startswith(b"#!/usr/bin/env python3\n")
