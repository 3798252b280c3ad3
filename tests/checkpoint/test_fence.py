"""Commit fence: ranks of an older attempt cannot commit once a newer attempt has started."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.checkpoint import commit
from hpcaccel.checkpoint_files import checkpoint_name, temporary_name
from hpcaccel.errors import CheckpointError


def publish(run: Path, *, attempt: int | str, place: str = "checkpoints") -> bool:
    temporary, final = run / place / temporary_name(4, attempt), run / place / checkpoint_name(4)
    temporary.mkdir(parents=True)
    commit.publish(temporary, final)
    return final.is_dir()


@pytest.mark.parametrize("attempt", [2, 9])
def test_older_attempt_cannot_commit_after_a_newer_one_has_started(tmp_path: Path, attempt: int) -> None:
    (tmp_path / "attempts" / "10").mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match=f"attempt 10 of this run has started: attempt {attempt} can no longer save"
    ):
        publish(tmp_path, attempt=attempt)
    assert not (tmp_path / "checkpoints" / checkpoint_name(4)).exists()


def test_newest_attempt_commits_and_other_directories_are_not_fenced(tmp_path: Path) -> None:
    for attempt in (1, 2, 10):
        (tmp_path / "attempts" / str(attempt)).mkdir(parents=True)
    assert publish(tmp_path, attempt=10)
    assert publish(tmp_path, attempt=1, place="elsewhere")  # the fence covers only "checkpoints"


def test_commit_needs_no_attempts_directory(tmp_path: Path) -> None:
    assert publish(tmp_path, attempt=1)
