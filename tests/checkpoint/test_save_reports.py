"""Reports of many writers: merged in blocks, read one by one where nobody has merged them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcaccel.checkpoint import rank_blocks, save_reports
from hpcaccel.checkpoint.rank_blocks import block_of, stored_file
from hpcaccel.checkpoint.written_file import WrittenFile


def written(rank: int, ranks: int) -> WrittenFile:
    return WrittenFile.of(stored_file(rank, ranks), [rank, 0], [64, 64])


def never() -> None:
    raise AssertionError("a poll has not found all reports")


@pytest.mark.parametrize("ranks", [1, 3, 4, 5, 8, 11, 16, 18])
def test_all_reports_arrive_in_order_and_no_folder_is_large(tmp_path, monkeypatch, ranks):
    monkeypatch.setattr(rank_blocks, "BLOCK", 4)
    for rank in reversed(range(ranks)):
        save_reports.deliver(tmp_path, written(rank, ranks), block=block_of(rank, ranks))
    read: list[str] = []
    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path.name), original(path))[1])
    assert save_reports.gather(tmp_path, ranks, never) == [written(rank, ranks) for rank in range(ranks)]
    assert len(read) == (ranks if ranks <= 4 else -(-ranks // 4))
    assert all(len(files) <= 4 + 1 for folder, _, files in os.walk(tmp_path) if folder != str(tmp_path))


def test_block_that_nobody_merged_is_read_by_rank_0(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_blocks, "BLOCK", 2)
    monkeypatch.setattr(save_reports, "MERGE_SECONDS", 0.0)
    for rank in range(5):
        save_reports.deliver(tmp_path, written(rank, 5), block=block_of(rank, 5))
    (tmp_path / "block_00001.block.json").unlink()
    polls: list[None] = []
    assert save_reports.gather(tmp_path, 5, lambda: polls.append(None)) == [written(rank, 5) for rank in range(5)]


def test_reports_of_a_block_are_merged_by_one_writer(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_blocks, "BLOCK", 2)
    for rank in range(4):
        save_reports.deliver(tmp_path, written(rank, 4), block=block_of(rank, 4))
    merged = tmp_path / "block_00001.block.json"
    before = merged.stat()
    save_reports.deliver(tmp_path, written(3, 4), block=block_of(3, 4))  # as a writer that has looked at the same time
    assert merged.stat() == before


def test_writer_of_an_empty_part_has_no_report_and_its_block_is_read_by_rank_0(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_blocks, "BLOCK", 2)
    monkeypatch.setattr(save_reports, "MERGE_SECONDS", 0.0)
    for rank in (0, 1, 3):
        save_reports.deliver(tmp_path, written(rank, 4), block=block_of(rank, 4))
    assert save_reports.gather(tmp_path, 3, lambda: None) == [written(rank, 4) for rank in (0, 1, 3)]
