"""Building the environment; a shell script replaces Python, venv and pip."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import hpcaccel
from hpcaccel.errors import ClusterError
from hpcaccel.spec import ClusterProfile
from hpcaccel.submission.remote.install import install_hpcaccel

PROFILE = ClusterProfile(name="alps")

PYTHON = r"""#!/bin/sh
case "$1 $2" in
  "-m venv") mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; printf '#!/bin/sh\necho hpcaccel 0.1.0\n' > "$4/bin/hpcaccel"
    chmod +x "$4/bin/hpcaccel";;
  "-m pip") [ "$3" = freeze ] && { echo typer==0.26.0; exit 0; }
    printf '%s\n' "$@" > "$(dirname "$0")/asked"
    [ -z "$PIP_HANGS" ] || { touch "$PIP_HANGS"; exec sleep 600; }
    [ -z "$PIP_DOES" ] || printf '%s\n' "$PIP_DOES"
    [ -z "$PIP_SAYS" ] || { echo "$PIP_SAYS" >&2; exit 1; };;
  "--version ") echo Python 3.6.8;;
  "-c import sys"*) [ "${0##*/}" != oldpython ];;
  "-c import venv"*) [ "${0##*/}" != barepython ];;
esac
"""

UNANSWERED = """\
WARNING: Retrying (Retry(total=4, connect=None, read=None, redirect=None, status=None)) after connection broken by \
'NewConnectionError('<pip._vendor.urllib3.connection.HTTPConnection object at 0x7f>: Failed to establish a new \
connection: [Errno 111] Connection refused')': /simple/pydantic/
ERROR: Could not find a version that satisfies the requirement pydantic==2.11 (from hpcaccel) (from versions: none)
ERROR: No matching distribution found for pydantic==2.11"""


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
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hpcaccel/__init__.py", "")
    return path


def test_second_installation_switches_to_a_new_environment(
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
    with pytest.raises(ClusterError, match="another installation may be running"):
        install_hpcaccel(PROFILE, directory=str(place), python=str(python), wheel=wheel)
    assert (place / "env/bin/hpcaccel").exists()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            UNANSWERED,
            r"pip cannot reach the package index from there \(\[Errno 111\] Connection refused\)\. If the site",
        ),
        (
            UNANSWERED.replace("NewConnectionError", "ReadTimeoutError").replace("[Errno 111] Connection refused", "x"),
            "pip cannot reach the package index from there",
        ),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "Free some space, or",
        ),
        ("ERROR: No matching (from versions: 1, 2)\nERROR: not a wheel", ": ERROR: No matching ERROR: not a wheel$"),
        ("Traceback\nImportError: broken", ": Traceback ImportError: broken$"),
    ],
)
def test_failed_installation_reports_the_cause_and_leaves_nothing(
    tmp_path: Path, python: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, said: str, expected: str
) -> None:
    monkeypatch.setenv("PIP_SAYS", said)
    there = tmp_path / "there"
    there.mkdir()
    for place in (tmp_path / "a b", there):
        with pytest.raises(ClusterError, match="nothing was installed on this machine: ") as error:
            install_hpcaccel(PROFILE, directory=str(place), python=str(python), wheel=wheel)
        error.match(expected)
    assert not (tmp_path / "a b").exists()
    assert list(there.iterdir()) == []


DOES = """\
Processing ./source/hpcaccel-0.1.0-py3-none-any.whl
Collecting torch==2.6.0
  Downloading torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl.metadata (28 kB)
Progress 28000 of 28000
  Downloading torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl (766.7 MB)
Progress 0 of 800
Progress 350 of 800
Requirement already satisfied: nothing
  Building wheel for x (pyproject.toml): started
  Building wheel for x (pyproject.toml): finished with status 'done'
Progress 1 of 2
Installing collected packages: torch"""


def test_pip_progress_is_reported(tmp_path: Path, python: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_DOES", DOES)
    told: list[tuple[str, int | None]] = []
    place = tmp_path / "place"
    install_hpcaccel(
        PROFILE, directory=str(place), python=str(python), wheel=wheel, on_progress=lambda *words: told.append(words)
    )
    torch = "Downloading torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl (766.7 MB)"
    assert told == [
        ("Processing ./source/hpcaccel-0.1.0-py3-none-any.whl", None),
        ("Collecting torch==2.6.0", None),
        (torch, None),
        (torch, 0),
        (torch, 43),
        ("Building wheel for x (pyproject.toml): started", None),
        ("Installing collected packages: torch", None),
    ]
    asked = (place / "env/bin/asked").read_text().split("\n")
    assert asked[asked.index("--progress-bar") + 1] == "raw"
    monkeypatch.setenv("PIP_SAYS", "broken\nProgress 1 of 2")
    with pytest.raises(ClusterError, match=r"Installing collected packages: torch broken$"):
        install_hpcaccel(PROFILE, directory=str(tmp_path / "x"), python=str(python), wheel=wheel)


def test_pip_output_is_reported_while_pip_runs(tmp_path: Path, python: Path, wheel: Path) -> None:
    """pip prints its second line only after the callback for the first one has created a file."""
    go_on = tmp_path / "go-on"
    waits = f"echo Collecting torch; until [ -e {go_on} ]; do sleep 0.05; done; echo Installing torch"
    python.write_text(PYTHON.replace('[ -z "$PIP_DOES" ] ||', f"{waits}; [ 1 ] ||"))
    told: list[str] = []

    def tell(doing: str, percent: int | None) -> None:
        told.append(doing)
        go_on.touch()
        if len(told) == 2:
            raise BrokenPipeError

    found = install_hpcaccel(PROFILE, directory=str(tmp_path / "x"), python=str(python), wheel=wheel, on_progress=tell)
    assert (told, found.version) == (["Collecting torch", "Installing torch"], "hpcaccel 0.1.0")


def test_ctrl_c_leaves_nothing(tmp_path: Path, python: Path, wheel: Path) -> None:
    started = tmp_path / "started"
    program = (
        "import sys, pathlib; from hpcaccel.spec import ClusterProfile;"
        "from hpcaccel.submission.remote.install import install_hpcaccel;"
        "install_hpcaccel(ClusterProfile(name='alps'), directory=sys.argv[1], python=sys.argv[2],"
        " wheel=pathlib.Path(sys.argv[3]))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "place"), str(python), str(wheel)],
        env={**os.environ, "PIP_HANGS": str(started)},
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 300
        while not started.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        assert child.wait(300) != 0
    finally:
        child.kill()
        child.wait()
    assert not (tmp_path / "place").exists()


def test_unsuitable_python_is_refused(tmp_path: Path, python: Path, wheel: Path) -> None:
    with pytest.raises(ClusterError, match="python9 was not found: load a module"):
        install_hpcaccel(PROFILE, directory=str(tmp_path / "x"), python="python9", wheel=wheel)
    old = python.rename(python.with_name("oldpython"))
    with pytest.raises(ClusterError, match=r"Python 3\.6\.8 is too old: hpcaccel needs 3\.10"):
        install_hpcaccel(PROFILE, directory=str(tmp_path / "x"), python=str(old), wheel=wheel)
    bare = old.rename(old.with_name("barepython"))
    with pytest.raises(ClusterError, match="has no venv"):
        install_hpcaccel(PROFILE, directory=str(tmp_path / "x"), python=str(bare), wheel=wheel)
    assert not (tmp_path / "x").exists()


def test_unusable_installation_directory_is_refused(tmp_path: Path, python: Path, wheel: Path) -> None:
    (tmp_path / "env").mkdir()
    with pytest.raises(ClusterError, match="was not created by this command"):
        install_hpcaccel(PROFILE, directory=str(tmp_path), python=str(python), wheel=wheel)
    with pytest.raises(ClusterError, match=r"nothing was installed .* Not a directory"):
        install_hpcaccel(PROFILE, directory=str(wheel / "x"), python=str(python), wheel=wheel)
