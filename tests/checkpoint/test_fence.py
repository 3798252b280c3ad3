"""Ranks that were believed dead commit nothing beside those that took their place."""

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
def test_a_later_attempt_has_begun(tmp_path: Path, attempt: int) -> None:
    (tmp_path / "attempts" / "10").mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match=f"attempt 10 of this run has started: attempt {attempt} can no longer save"
    ):
        publish(tmp_path, attempt=attempt)
    assert not (tmp_path / "checkpoints" / checkpoint_name(4)).exists()


def test_the_newest_attempt_saves(tmp_path: Path) -> None:
    for attempt in (1, 2, 10):
        (tmp_path / "attempts" / str(attempt)).mkdir(parents=True)
    assert publish(tmp_path, attempt=10)
    assert publish(tmp_path, attempt=1, place="elsewhere")  # save_state("elsewhere") is the script's own affair


def test_there_are_no_attempts(tmp_path: Path) -> None:
    assert publish(tmp_path, attempt=1)
