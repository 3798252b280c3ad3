"""Building the environment; a small script stands in for Python, its venv and its pip."""

from __future__ import annotations

from pathlib import Path

import pytest

import hpcaccel
from hpcaccel.errors import ClusterError, UserError
from hpcaccel.spec import ClusterProfile
from hpcaccel.submission.probing.installing import install_hpcaccel

PROFILE = ClusterProfile(name="alps")

PYTHON = r"""#!/bin/sh
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; printf '#!/bin/sh\necho hpcaccel 0.1.0\n' > "$3/bin/hpcaccel"
    chmod +x "$3/bin/hpcaccel";;
  "-m pip") [ "$3" = freeze ] && { echo typer==0.26.0; exit 0; }
    printf '%s\n' "$@" > "$(dirname "$0")/asked"
    if grep -q "no wheel" "$(dirname "$0")"/../source/*.whl; then echo "ERROR: not a wheel" >&2; exit 1; fi;;
  "--version ") echo Python 3.6.8;;
  "-c import sys"*) [ "${0##*/}" != oldpython ];;
esac
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin" / "python"
    path.write_text(PYTHON)
    path.chmod(0o755)
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "hpcaccel-0.1.0-py3-none-any.whl"
    path.write_text("a wheel")
    return path


def test_an_environment_and_a_newer_one(
    tmp_path: Path, python: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "it's shared"
    found = install_hpcaccel(
        PROFILE, directory=str(place), python=str(python), wheel=wheel, extras=["train"], packages=["torch==2.6.0"]
    )
    assert (found.version, found.program) == ("hpcaccel 0.1.0", f"{place}/env/bin/hpcaccel")
    assert "typer==0.26.0" in Path(found.lock).read_text()
    first = (place / "env").resolve()
    asked = (first / "bin/asked").read_text().split("\n")
    assert f"{first}/source/{wheel.name}[train]" in asked
    assert "torch==2.6.0" in asked
    assert first.stat().st_mode & 0o007 == 0
    pins = (first / "source/constraints.txt").read_text()
    assert "pydantic==" in pins
    assert "torch" not in pins
    monkeypatch.setattr("time.strftime", lambda form: "later")
    install_hpcaccel(PROFILE, directory=str(place), python=str(python), wheel=wheel)
    assert (place / "env").resolve() == place / f"env-{hpcaccel.__version__}-later"
    assert first.is_dir()


def test_what_fails_leaves_nothing(tmp_path: Path, python: Path, wheel: Path) -> None:
    wheel.write_text("no wheel")
    with pytest.raises(ClusterError, match="nothing was installed on this machine: ERROR: not a wheel"):
        install_hpcaccel(PROFILE, directory=str(tmp_path / "a b"), python=str(python), wheel=wheel)
    assert list((tmp_path / "a b").iterdir()) == []


def test_a_python_that_will_not_do(tmp_path: Path, python: Path, wheel: Path) -> None:
    with pytest.raises(ClusterError, match="there is no python9 there: load a module"):
        install_hpcaccel(PROFILE, directory=str(tmp_path / "x"), python="python9", wheel=wheel)
    old = python.rename(python.with_name("oldpython"))
    with pytest.raises(ClusterError, match=r"Python 3\.6\.8 there is too old: hpcaccel needs 3\.10"):
        install_hpcaccel(PROFILE, directory=str(tmp_path / "x"), python=str(old), wheel=wheel)
    assert not (tmp_path / "x").exists()


def test_a_place_that_is_taken(tmp_path: Path, python: Path, wheel: Path) -> None:
    (tmp_path / "env").mkdir()
    with pytest.raises(ClusterError, match="was not made by this command"):
        install_hpcaccel(PROFILE, directory=str(tmp_path), python=str(python), wheel=wheel)
    with pytest.raises(UserError, match="there is no wheel"):
        install_hpcaccel(PROFILE, directory=str(tmp_path), python=str(python), wheel=tmp_path / "none.whl")
