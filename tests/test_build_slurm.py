"""`docker/cluster build-slurm`, with a small source tree in place of Slurm's, which takes minutes to build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "docker" / "cluster"

META = "  Meta:\t1\n  Name:\tslurm\n  Version:\t26.11.0\n  Release:\t{release}\n"
# Like Slurm's: takes options, writes a Makefile to the current folder, and does not report missing libraries.
CONFIGURE = """#!/bin/sh
for word; do case $word in --prefix=*) prefix=${word#*=};; esac; done
echo "configured with $*"
cat > Makefile <<END
all:
	@for n in 1 2 3; do echo "gcc -c -o \\$\\$n.o \\$\\$n.c"; done
	@echo "libtool: compile: gcc -c x.c"
	@MAKE_DOES
install:
	mkdir -p $prefix/bin $prefix/sbin $prefix/lib/slurm
	touch $prefix/sbin/slurmctld PLUGINS
END
"""


def _tree(folder: Path, *, make_does: str = "true", plugins: bool = True, release: str = "0rc1") -> Path:
    folder.mkdir()
    (folder / "META").write_text(META.format(release=release))
    made = " ".join(f"$prefix/lib/slurm/{name}.so" for name in ("accounting_storage_mysql", "auth_munge"))
    text = CONFIGURE.replace("MAKE_DOES", make_does).replace("PLUGINS", made if plugins else "")
    (folder / "configure").write_text(text)
    (folder / "configure").chmod(0o755)
    return folder


def _build(source: Path, *args: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **({} if path is None else {"PATH": path})}
    command = [sys.executable, str(PROGRAM), "build-slurm", str(source), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def tools(tmp_path: Path) -> str:
    """A PATH with all build tools, whatever this machine has."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in ("cc", "mariadb_config"):
        (folder / name).write_text("#!/bin/sh\nexit 0\n")
        (folder / name).chmod(0o755)
    if shutil.which("make") is None:
        pytest.skip("there is no make on this machine")
    return f"{folder}:{os.environ['PATH']}"


def test_build_installs_to_the_prefix_and_leaves_the_source_unchanged(tmp_path: Path, tools: str) -> None:
    source, prefix, folder = _tree(tmp_path / "source"), tmp_path / "prefix", tmp_path / "build"
    before = sorted(path.name for path in source.iterdir())
    answer = _build(source, f"--prefix={prefix}", f"--build-dir={folder}", path=tools)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == f'export PATH={prefix}/bin:{prefix}/sbin:"$PATH"\n'
    steps = [line.partition("] ")[2] for line in answer.stderr.splitlines()]
    assert steps == [
        f"Slurm 26.11.0-0rc1 from {source}, compiled in {folder}, for {prefix}",
        "configure",
        "make",
        "make install",
    ]
    assert "--enable-multiple-slurmd" in (folder / "build.log").read_text()
    assert (prefix / "sbin" / "slurmctld").exists()
    assert sorted(path.name for path in source.iterdir()) == before


def test_missing_build_tools_are_named_with_the_install_command(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    answer = _build(_tree(tmp_path / "source"), f"--prefix={tmp_path}/prefix", path=str(empty))
    assert answer.returncode == 2
    assert "not installed: cc, make, mariadb_config or mysql_config. " in answer.stderr
    assert "apt-get install --yes --no-install-recommends build-essential libmariadb-dev" in answer.stderr
    assert not (tmp_path / "prefix").exists()


def test_failed_build_step_shows_the_end_of_its_output(tmp_path: Path, tools: str) -> None:
    source = _tree(tmp_path / "source", make_does="echo 'slurm.c:7: error: no such thing'; exit 3")
    answer = _build(source, f"--prefix={tmp_path}/prefix", f"--build-dir={tmp_path}/build", path=tools)
    assert answer.returncode == 2
    assert "error: make failed with exit code 2; see " in answer.stderr
    assert "  | slurm.c:7: error: no such thing" in answer.stderr


def test_build_without_the_required_plugins_is_refused(tmp_path: Path, tools: str) -> None:
    source = _tree(tmp_path / "source", plugins=False)
    answer = _build(source, f"--prefix={tmp_path}/prefix", f"--build-dir={tmp_path}/build", path=tools)
    assert answer.returncode == 2
    assert "built without accounting_storage_mysql.so, auth_munge.so" in answer.stderr


def test_source_tree_that_was_configured_in_place_is_refused(tmp_path: Path, tools: str) -> None:
    source = _tree(tmp_path / "source")
    (source / "config.status").touch()
    answer = _build(source, f"--prefix={tmp_path}/prefix", path=tools)
    assert answer.returncode == 2
    assert "make distclean" in answer.stderr


def test_wrong_source_folder_and_used_prefix_are_refused(tmp_path: Path, tools: str) -> None:
    assert "is not a Slurm source tree" in _build(tmp_path, path=tools).stderr
    source, prefix = _tree(tmp_path / "source"), tmp_path / "prefix"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "sbatch").touch()
    assert "already contains an installation" in _build(source, f"--prefix={prefix}", path=tools).stderr
