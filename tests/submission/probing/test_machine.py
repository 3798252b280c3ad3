from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpcaccel.submission.clusters import machine

ANSWER = """\
@@ user
ada
@@ groups
ada
ml users
@@ home
/home/ada
@@ scratch
/scratch/ada
@@ apptainer
apptainer version 1.3.4-1.el9
@@ enroot
3.4.1
@@ python
3.11.7
@@ hpcaccel
hpcaccel 0.1.0
@@ bytes /home/ada
Filesystem 1024-blocks Used Available Capacity Mounted on
nfs:/home       1000    600       400      60% /home
@@ inodes /home/ada
Filesystem Inodes IUsed IFree IUse% Mounted on
nfs:/home     500   100   400   20% /home
@@ bytes /scratch/ada
Filesystem 1024-blocks Used Available Capacity Mounted on
10.0.0.1@o2ib:/lustre  90000 100 89900 1% /scratch
@@ inodes /scratch/ada
Filesystem Inodes IUsed IFree IUse% Mounted on
10.0.0.1@o2ib:/lustre 0 0 0 - /scratch
@@ lustre /scratch/ada
/scratch/ada
                 2048*   1024    4096       -     10       0      20       -
"""


def test_machine_facts_are_parsed() -> None:
    found = machine.read(ANSWER)
    assert (found.user, found.groups, found.home, found.scratch) == (
        "ada",
        ["ada", "ml users"],
        "/home/ada",
        ["/scratch/ada"],
    )
    assert (found.apptainer, found.enroot, found.singularity) == ("1.3.4-1.el9", "3.4.1", None)
    assert (found.python, found.hpcaccel) == ("3.11.7", "0.1.0")
    home, scratch = found.quota
    assert (home.source, home.bytes_limit, home.bytes_used) == ("df", 1000 * 1024, 600 * 1024)
    assert (home.inodes_limit, home.inodes_used) == (500, 100)
    assert (scratch.source, scratch.bytes_limit, scratch.bytes_used) == ("lfs quota", 4096 * 1024, 2048 * 1024)
    assert (scratch.inodes_limit, scratch.inodes_used) == (20, 10)


def test_user_quota_overrides_the_size_of_the_file_system() -> None:
    told = (
        "@@ quota\nDisk quotas for user ada (uid 1000):\n  Filesystem  blocks  quota  limit  grace  files  quota\n"
        "  nfs:/home     600    800   1000             100      0      0\n"
    )
    home = machine.read(ANSWER + told).quota[0]
    assert (home.source, home.bytes_limit, home.inodes_limit, home.inodes_used) == ("quota", 1000 * 1024, None, 100)


def test_missing_answers_are_unknown() -> None:
    assert machine.read("") == machine.Machine()
    assert machine.read("@@ hpcaccel\nsh: hpcaccel: command not found\n@@ python\n").hpcaccel is None


def test_script_reads_the_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with space").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "with space"))
    found = machine.ask(subprocess.run, program="~/none", paths=["~/not/there yet", "relative"])
    assert found.user
    assert found.home == str(tmp_path)
    assert found.scratch == [str(tmp_path / "with space")]
    assert [one.path for one in found.quota] == [
        str(tmp_path),
        str(tmp_path / "with space"),
        f"{tmp_path}/not/there yet",
    ]
    assert all(one.bytes_limit for one in found.quota)
    assert sorted(os.listdir(tmp_path)) == ["with space"]
