"""Building the environment with the real venv and pip, a package index and a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.chaos

SMALL_DISK = r"""
place=$1; shift
mount -t tmpfs -o size=24m none "$place" || exit 77
"$@"; code=$?
echo "left: $(ls -A "$place")"
exit $code
"""


def install(
    place: Path, *options: str, before: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "hpcaccel", "cluster", "install", "local", "--dir", str(place), *options]
    return subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False)


def test_installed_environment_works_and_can_install_itself(tmp_path: Path) -> None:
    done = install(tmp_path / "place")
    if "pip cannot reach the package index" in done.stderr:
        pytest.skip("no package index answers here")
    assert done.returncode == 0, done.stderr
    program = tmp_path / "place/env/bin/hpcaccel"
    said = subprocess.run([program, "schema"], capture_output=True, text=True, check=True, cwd=tmp_path, env={})
    assert '"slurm"' in said.stdout
    assert "pydantic==" in (tmp_path / "place/env/hpcaccel-lock.txt").read_text()
    (again,) = (tmp_path / "place/env/source").glob("*.whl")
    first = os.readlink(tmp_path / "place/env")
    assert install(tmp_path / "place", "--wheel", str(again)).returncode == 0
    assert os.readlink(tmp_path / "place/env") != first
    # the installed hpcaccel packs its own files and installs itself elsewhere
    second = [str(program), "cluster", "install", "local", "--dir", str(tmp_path / "second")]
    assert subprocess.run(second, check=False).returncode == 0
    assert (tmp_path / "second/env/bin/hpcaccel").exists()


def test_unreachable_package_index_leaves_nothing(tmp_path: Path) -> None:
    nobody = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": "/dev/null", "PIP_RETRIES": "1"}
    nobody |= {"PIP_NO_CACHE_DIR": "1", "PIP_FIND_LINKS": ""}
    done = install(tmp_path / "place", env=nobody)
    assert done.returncode == 2
    assert (
        "nothing was installed on this machine: pip cannot reach the package index from there ([Errno 111]"
        in done.stderr
    )
    assert not (tmp_path / "place").exists()


def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    small = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, "sh", str(tmp_path))
    done = install(tmp_path / "place", before=small)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    assert done.returncode == 2
    assert "no space left in" in done.stderr
    assert done.stdout == "left: \n"
