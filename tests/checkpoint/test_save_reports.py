"""Reports of many writers: merged in blocks, read one by one where nobody has merged them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from hpcaccel.checkpoint import rank_blocks, save_reports
from hpcaccel.checkpoint.block_files import write_blocks
from hpcaccel.checkpoint.rank_blocks import block_of, stored_file
from hpcaccel.checkpoint.written_file import PlannedChunk, WrittenFile
from hpcaccel.checkpoint_files import SavePaths


def written(rank: int, ranks: int) -> WrittenFile:
    chunks = [
        PlannedChunk("x", "uint8", [64 * ranks], [64 * rank], [64], 64, in_block=True),
        PlannedChunk("y", "uint8", [32 * ranks], [32 * rank], [32], 32),
    ]
    return WrittenFile.of(stored_file(rank, ranks), [rank, 0], [64, 64], chunks)


def never() -> None:
    raise AssertionError("a poll has not found all reports")


@pytest.fixture
def paths(tmp_path):
    paths = SavePaths(tmp_path, 1, 1)
    for folder in (paths.results, paths.temporary):
        folder.mkdir()
    return paths


def deliver(paths: SavePaths, rank: int, ranks: int) -> None:
    rank_blocks.make_block_folder(paths.temporary, stored_file(rank, ranks))
    save_reports.deliver(paths, written(rank, ranks), block=block_of(rank, ranks))


def expected(tmp_path: Path, ranks: list[int], size: int) -> list[dict[str, object]]:
    """What the blocks' summaries are, if they are made from all reports at once."""
    again = tmp_path / "again"
    again.mkdir()
    for rank in ranks:
        rank_blocks.make_block_folder(again, stored_file(rank, size))
    summaries = write_blocks(again, [written(rank, size) for rank in ranks])
    return json.loads(json.dumps(summaries))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_reports_of_one_block_arrive_in_order(paths, monkeypatch, ranks):
    monkeypatch.setattr(rank_blocks, "BLOCK", 4)
    for rank in reversed(range(ranks)):
        deliver(paths, rank, ranks)
    found = save_reports.gather(paths, ranks, never)
    assert [one.file for one in found] == [stored_file(rank, ranks) for rank in range(ranks)]
    assert [PlannedChunk._make(one.chunks[0]).at for one in found] == [[64 * rank] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [5, 8, 11, 16, 18])
def test_each_block_is_written_by_one_of_its_writers_and_no_folder_is_large(paths, tmp_path, monkeypatch, ranks):
    monkeypatch.setattr(rank_blocks, "BLOCK", 4)
    for rank in reversed(range(ranks)):
        deliver(paths, rank, ranks)
    read: list[str] = []
    original = Path.read_bytes
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: (read.append(path.name), original(path))[1])
        found = save_reports.gather_blocks(paths, ranks, never)
    assert found == expected(tmp_path, list(range(ranks)), ranks)
    assert contents(paths.temporary) == contents(tmp_path / "again")
    assert len(read) == -(-ranks // 4)
    assert all(len(files) <= 4 + 1 for folder, _, files in os.walk(paths.results) if folder != str(paths.results))


def test_block_that_nobody_merged_is_written_by_rank_0(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_blocks, "BLOCK", 2)
    monkeypatch.setattr(save_reports, "MERGE_SECONDS", 0.0)
    for rank in range(5):
        deliver(paths, rank, 5)
    (paths.results / "block_00001.block.json").unlink()
    (paths.results / "block_00001" / "merging").unlink()
    assert save_reports.gather_blocks(paths, 5, list) == expected(tmp_path, list(range(5)), 5)


def test_block_of_a_writer_that_was_killed_while_it_merged_is_written_by_rank_0_after_a_while(
    paths, tmp_path, monkeypatch
):
    monkeypatch.setattr(rank_blocks, "BLOCK", 2)
    monkeypatch.setattr(save_reports, "MERGE_SECONDS", 0.0)
    monkeypatch.setattr(save_reports, "MERGING_SECONDS", 0.2)
    for rank in range(5):
        deliver(paths, rank, 5)
    (paths.results / "block_00001.block.json").unlink()
    polls: list[None] = []
    assert save_reports.gather_blocks(paths, 5, lambda: polls.append(None)) == expected(tmp_path, list(range(5)), 5)
    assert len(polls) > 2


def test_block_whose_writer_has_no_room_for_its_part_is_written_by_rank_0_without_a_wait(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_blocks, "BLOCK", 2)
    monkeypatch.setattr(save_reports, "MERGE_SECONDS", 0.0)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(save_reports, "write_block", full)
        for rank in range(2):
            deliver(paths, rank, 3)
    deliver(paths, 2, 3)
    assert not (paths.results / "block_00000" / "merging").exists()
    assert save_reports.gather_blocks(paths, 3, list) == expected(tmp_path, [0, 1, 2], 3)


def test_reports_of_a_block_are_merged_by_one_writer(paths, monkeypatch):
    monkeypatch.setattr(rank_blocks, "BLOCK", 2)
    for rank in range(4):
        deliver(paths, rank, 4)
    merged = paths.results / "block_00001.block.json"
    before = merged.stat()
    deliver(paths, 3, 4)  # as a writer that has looked at the same time
    assert merged.stat() == before


def test_writer_of_an_empty_part_has_no_report_and_its_block_is_written_by_rank_0(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_blocks, "BLOCK", 2)
    monkeypatch.setattr(save_reports, "MERGE_SECONDS", 0.0)
    for rank in (0, 1, 3):
        deliver(paths, rank, 4)
    assert save_reports.gather_blocks(paths, 3, list) == expected(tmp_path, [0, 1, 3], 4)
