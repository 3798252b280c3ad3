"""Fixtures: a stand-in for Apptainer, and an image with torch but without hpcaccel."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

STAND_IN = Path(__file__).with_name("stand_in.py")
PACKAGES = (
    "torch", "numpy", "numpy.libs", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock",
    "typing_extensions.py", "torchgen", "functorch", "setuptools",
)  # fmt: skip


def make_image(folder: Path) -> Path:
    """A stand-in image: links to this Python's torch and its dependencies."""
    libraries = folder / "libraries"
    libraries.mkdir()
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    site = Path(found.origin).parents[1]
    for name in PACKAGES:
        if (site / name).exists():
            (libraries / name).symlink_to(site / name)
    image = folder / "torch.sif"
    image.write_text(str(libraries))
    return image


def make_apptainer(folder: Path) -> Path:
    """A directory for PATH with the stand-in ``apptainer``."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "apptainer").write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    (programs / "apptainer").chmod(0o755)
    return programs


def system_python_is_ours() -> bool:
    """Whether the system's Python, which the image uses, has this Python's version, so that it can import its torch."""
    system = shutil.which("python3", path="/usr/bin")
    if system is None:
        return False
    return os.path.realpath(system).endswith(f"python{sys.version_info[0]}.{sys.version_info[1]}")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap: apt-get install bubblewrap")
    if not system_python_is_ours():
        pytest.skip("needs the system's Python to be of the version that the tests run in")
    return make_image(tmp_path)


@pytest.fixture
def apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = make_apptainer(tmp_path)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "pulled"))
    monkeypatch.setenv("STAND_IN_LIBRARIES", str(tmp_path / "libraries"))
    return programs
