"""The batch step's program."""

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


def test_it_runs_from_an_empty_directory_without_any_package(program: Path, tmp_path: Path) -> None:
    # -S: no site-packages; -I: nothing of the environment or of the current directory
    command = [sys.executable, "-S", "-I", str(program), "supervise", str(tmp_path / "no-run")]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not the directory of a submitted run" in done.stderr


def test_it_holds_the_base_and_the_batch_step_only(program: Path) -> None:
    with zipfile.ZipFile(program) as archive:
        names = [name.removesuffix("c") for name in archive.namelist() if name.endswith((".py", ".pyc"))]
    rooms = {name.split("/")[1] for name in names if name.startswith("hpcaccel/")}
    base = {"__init__.py", "errors.py", "core", "checkpoint_files", "slurm"}
    assert rooms == {*base, "node"}


def test_what_is_compiled_for_this_python_is_used_and_the_source_by_others(program: Path) -> None:
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


def test_the_same_code_makes_the_same_bytes(program: Path) -> None:
    assert program.read_bytes() == build_node_program()


def test_it_can_be_started_by_its_name(program: Path) -> None:
    assert os.access(program, os.X_OK)
    assert program.read_bytes().startswith(b"#!/usr/bin/env python3\n")
