"""``hpcaccel cluster``, on machines without Slurm; tests/cluster/test_probing.py uses a real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcaccel.cli.cluster_install import _progress
from hpcaccel.spec.cluster.cluster_facts import Partition, SiteFacts, facts_text

from .conftest import Shell

FACTS = SiteFacts(
    name="alps", probed_at=1.7e9, slurm_version="24.05.6", partitions=[Partition(name="gpu", default=True)]
)


def stored(shell: Shell, text: str) -> Path:
    path = Path(shell.environment["XDG_CONFIG_HOME"]) / "hpcaccel/clusters/alps.facts/facts.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_new_profile_is_checked_listed_and_shown(shell: Shell) -> None:
    added = shell("cluster", "add", "alps", "--no-probe", "--set", "slurm.partition=gpux", "--set", "slurm.time=10")
    assert added.returncode == 0, added.stderr
    assert "hpcaccel cluster check alps" in added.stdout
    unknown = shell("cluster", "check", "alps")
    assert (unknown.returncode, unknown.stderr) == (
        2,
        "error: no facts about cluster 'alps' are stored yet. Probe it: hpcaccel cluster probe alps\n",
    )
    stored(shell, facts_text(FACTS))
    checked = shell("cluster", "check", "alps", "--json")
    assert checked.returncode == 2
    answer = json.loads(checked.stdout)
    assert (answer["agrees"], [one["key"] for one in answer["findings"]]) == (False, ["slurm.partition"])
    said = shell("cluster", "check", "alps").stdout
    assert "'gpux'" in said
    assert "days old; probe it again: hpcaccel cluster probe alps" in said
    listed = json.loads(shell("cluster", "list", "--json").stdout)
    assert [(one["name"], one["where"]) for one in listed] == [("alps", "this machine"), ("local", "no Slurm")]
    assert "slurm_version: 24.05.6" in shell("cluster", "show", "alps").stdout


def test_cluster_add_without_slurm_is_refused_and_adds_no_profile(shell: Shell) -> None:
    probed = shell("cluster", "add", "alps")
    assert probed.returncode == 2
    assert "sinfo was not found on this machine" in probed.stderr
    assert json.loads(shell("cluster", "list", "--json").stdout)[0]["name"] == "local"


def test_bad_cluster_command_prints_one_error(shell: Shell) -> None:
    shell("cluster", "add", "alps", "--no-probe")
    stored(shell, "version: 99\n")
    for arguments, words in (
        (["probe", "alsp"], "no cluster profile 'alsp' (available: alps, local"),
        (["add", "alps"], "profile 'alps' already exists"),
        (["check", "alps"], "was written by a newer hpcaccel"),
        (["show", "alps"], "was written by a newer hpcaccel"),
        (["probe", "local"], "nothing to probe"),
        (["install", "alps", "--wheel", "none.whl"], "wheel 'none.whl' does not exist"),
    ):
        result = shell("cluster", *arguments)
        assert result.returncode == 2, arguments
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, result.stderr
        assert words in errors[0]
        assert "Traceback" not in result.stderr
    assert "newer hpcaccel" in shell("cluster", "list").stdout


def test_install_progress_without_a_terminal_is_one_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    with _progress() as tell:
        tell("Collecting \x1b[2Jtorch", None)
        tell("Downloading torch", 40)
    assert capsys.readouterr() == ("", "  Collecting \\x1b[2Jtorch\n")
