"""The files of a checkpoint of many ranks: their sizes are looked up by several threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hpcaccel.checkpoint_files import manifest

FILES = manifest.MANY_FILES + 8


@pytest.fixture
def checkpoint(tmp_path):
    for number in range(FILES):
        (tmp_path / f"rank_{number:05d}.bin").write_bytes(b"x" * number)
    return tmp_path, {"files": {path.name: {"bytes": path.stat().st_size} for path in sorted(tmp_path.iterdir())}}


def test_missing_and_shortened_files_are_named_in_the_order_of_the_manifest(checkpoint):
    folder, content = checkpoint
    assert list(manifest.wrong_sizes(folder, content)) == []
    (folder / "rank_00003.bin").unlink()
    (folder / f"rank_{FILES - 1:05d}.bin").write_bytes(b"")
    (folder / "rank_00050.bin").write_bytes(b"")
    assert [problem.removeprefix(f"{folder}/") for problem in manifest.wrong_sizes(folder, content)] == [
        "rank_00003.bin is missing",
        "rank_00050.bin has 0 bytes, but 50 were committed",
        f"rank_{FILES - 1:05d}.bin has 0 bytes, but {FILES - 1} were committed",
    ]


def test_sizes_of_many_files_are_looked_up_at_the_same_time(checkpoint, monkeypatch):
    folder, content = checkpoint
    together = threading.Barrier(4)
    look = Path.stat

    def wait_for_others(path, **words):
        if path.parent == folder:
            together.wait(60)  # FILES is a multiple of 4: the last lookup has company, too
        return look(path, **words)

    monkeypatch.setattr(Path, "stat", wait_for_others)
    assert list(manifest.wrong_sizes(folder, content)) == []


def test_unreachable_file_system_is_no_damage(checkpoint, monkeypatch):
    folder, content = checkpoint

    def unreachable(path, **words):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", unreachable)
    with pytest.raises(PermissionError):
        list(manifest.wrong_sizes(folder, content))
