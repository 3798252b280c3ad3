"""Commands used before a job is queued (``validate``, ``--diff``, ``clean``, ``plan``), without Slurm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.cli.steer import _delete_all
from hpcaccel.errors import RunDirectoryError
from hpcaccel.submission.runs.clean import Cleaning, Item

FACTS = """\
version: 1
name: alps
probed_at: 1700000000
slurm_version: 23.11.4
partitions:
  - {name: gpu, default: true, max_time_minutes: 60, nodes: 4}
  - {name: cancelling, preempt_mode: CANCEL, nodes: 4}
  - {name: high, priority_tier: 5, nodes: 4}
config: {preempt_type: preempt/partition_prio, preempt_mode: REQUEUE}
"""


@pytest.fixture
def alps(shell: Any, spec: Path) -> None:
    folder = Path(shell.environment["XDG_CONFIG_HOME"], "hpcaccel", "clusters")
    (folder / "alps.facts").mkdir(parents=True)
    (folder / "alps.yaml").write_text("backend: slurm\n")
    (folder / "alps.facts" / "facts.yaml").write_text(FACTS)


def test_validate_checks_a_spec_against_the_facts_of_its_cluster(shell: Any, alps: None, refused: Any) -> None:
    answer = shell("validate", "job.yaml", "--cluster", "alps", "slurm.partition=cancelling")
    assert answer.returncode == 0
    assert "note: resilience.chain null: partition 'cancelling' preempts by cancelling" in answer.stderr
    message = refused(shell("validate", "job.yaml", "--cluster", "alps", "slurm.partition=gpuu", "slurm.nodes=9"))
    assert "slurm.partition 'gpuu' is not on cluster 'alps' (has: gpu, cancelling, high)" in message
    assert "Did you mean 'gpu'?" in message
    assert "[facts of alps, " in message
    assert "hpcaccel cluster probe alps" in message
    answer = shell("validate", "job.yaml", "--cluster", "alps", "slurm.time=90", "--json")
    assert json.loads(answer.stdout)["problems"][0].startswith("slurm.time 01:30:00 is longer than partition 'gpu'")


def test_submit_diff_shows_changes_and_clean_deletes_only_with_yes(shell: Any, spec: Path) -> None:
    first = json.loads(shell("submit", "job.yaml", "--cluster", "local", "--wait", "--json").stdout)
    answer = shell("submit", "job.yaml", "--cluster", "local", "--diff", "--dry-run", "slurm.time=20")
    assert f"changed since {first['run_id']}" in answer.stdout
    assert "slurm.time: 00:10:00 -> 00:20:00" in answer.stdout
    told = shell("clean", "--older-than", "0m", "--runs")
    assert "would delete" in told.stdout
    assert Path(first["path"]).exists()
    done = json.loads(shell("clean", "--older-than", "0m", "--runs", "--yes", "--json").stdout)
    assert [item["kind"] for item in done["items"]] == ["run"]
    assert not Path(first["path"]).exists()


def test_clean_reports_failed_deletions_as_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def delete(item: Item, **_: Any) -> None:
        if item.path.name == "b":
            raise RunDirectoryError(f"{item.path} stays: a test")

    monkeypatch.setattr("hpcaccel.submission.runs.clean.delete", delete)
    items = [Item(path=Path(name), kind="run", run_id=name, why="it is completed", bytes=1000) for name in "abc"]
    done, failed = _delete_all(Cleaning(items=tuple(items), kept=()), yes=True, verbose=True)
    assert ([item.run_id for item in done], failed) == (["a", "c"], ["b stays: a test"])
    told = capsys.readouterr()
    assert [line.split()[3] for line in told.out.splitlines()] == ["a", "c"]
    assert told.err == "error: b stays: a test\n"


def test_unsupported_commands_are_refused_and_debug_renames_the_run(shell: Any, spec: Path, refused: Any) -> None:
    assert "not an age" in refused(shell("clean", "--older-than", "soon"))
    assert "salloc" in refused(shell("run", "job.yaml"))
    assert "the local backend has no queue" in refused(shell("plan", "job.yaml", "--cluster", "local"))
    answer = shell("submit", "job.yaml", "--cluster", "local", "--debug", "--dry-run", "--json")
    assert json.loads(answer.stdout)["name"] == "hello-debug"
