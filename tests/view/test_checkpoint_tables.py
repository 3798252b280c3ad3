"""Tests of the checkpoint table: damaged, pinned and quarantined checkpoints."""

from __future__ import annotations

import io
from pathlib import Path

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint_files import pin, unpin
from hpcaccel.view.checkpoint_tables import list_checkpoints, print_checkpoints, put_aside
from tests.submission.test_checkpoints import damage, make


def test_checkpoint_list_shows_damaged_and_pinned_checkpoints(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    damage(tmp_path / "step_00000001")
    assert pin(tmp_path / "step_00000002", why="a paper")
    assert not pin(tmp_path / "step_00000002", why="again")
    (tmp_path / "step_00000003" / checkpoint_files.MANIFEST).unlink()
    make(tmp_path / "other", 9).rename(tmp_path / "quarantined_step_00000009")
    (tmp_path / ".step_00000004.1.tmp").mkdir()
    found = list_checkpoints(tmp_path)
    assert [(one.step, one.problem is None, one.pinned) for one in found] == [
        (1, False, False),
        (2, True, True),
        (3, False, False),
    ]
    assert found[0].to_json()["problem"].endswith("has 0 bytes, but 100 were committed")
    stream = io.StringIO()
    print_checkpoints(found, stream=stream)
    states = [line.rstrip().rsplit("  ", 1)[1].strip() for line in stream.getvalue().splitlines()[1:]]
    assert states == ["damaged", "good, pinned", "damaged"]
    assert put_aside(tmp_path) == ["quarantined_step_00000009"]
    assert unpin(tmp_path / "step_00000002")
    assert not unpin(tmp_path / "step_00000002")
