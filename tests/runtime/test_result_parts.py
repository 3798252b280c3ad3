"""Files of a ``ResultsFile``: torn lines, results of two processes, and a merge that is killed or has no room."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import atomic_writer
from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.batch_inference.result_parts import Plan, ResultParts, append_results

ITEMS = [f"text {number}" for number in range(7)]


def parts_of(folder: Path) -> ResultParts:
    return ResultParts(folder / "a.jsonl", Plan.of(ITEMS, batch_size=2, settings={}))


def fill(parts: ResultParts, batches: range) -> str:
    start, _ = parts.open()
    for batch in batches:
        span = parts._plan.span(batch)
        append_results(parts.part(start, batch % 2), batch, [f"{batch}"] * len(span), first=span.start)
    return start


def test_torn_and_foreign_lines_do_not_count(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    start = fill(parts, range(3))
    with parts.part(start, 0).open("ab") as file:
        file.write(b"\0\0\0\n[1]\n7\n{}\n" + b'{"batch":3,"results":["a","b"]}\n{"batch":9,"results":["a"]}\n')
        file.write(b'{"batch":"3","results":["a"]}\n{"batch":3,"results":["to')
    assert parts.open()[1] == [3]
    append_results(parts.part(start, 0), 3, ["half \ud800"], first=6)  # the same process may go on after an error
    assert parts.open()[1] == []
    assert parts.merge(ITEMS, []) == []
    assert [line["result"] for line in lines(parts.path)] == ["0", "0", "1", "1", "2", "2", "half \ud800"]


def test_batch_that_two_processes_have_done_is_in_the_file_once(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    fill(parts, range(4))
    late = parts.folder / "99991231-000000-ffff-00000.jsonl"  # of a process on a node that was given up
    for batch in range(3):
        append_results(late, batch, ["other"] * 2, first=2 * batch)
    assert parts.merge(ITEMS, []) == []
    assert [line["item"] for line in lines(parts.path)] == ITEMS
    assert "other" not in parts.path.read_text()
    append_results(late, 0, ["after the merge"] * 2, first=0)
    assert parts.open()[1] is None
    assert "after" not in parts.path.read_text()


def kill_at_call(number: int) -> Callable[..., Any]:
    """Trace function that ends the process with SIGKILL before the NUMBERth call that changes a file of the merge."""
    left = [number]

    def trace(event: str, about: tuple[Any, ...]) -> None:
        creates = event == "open" and not isinstance(about[0], int) and about[2] & os.O_CREAT
        if creates or event in ("os.rename", "os.remove"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return trace


def merge_until_killed(folder: Path, number: int) -> None:
    parts = parts_of(folder)
    parts.open()
    sys.addaudithook(kill_at_call(number))
    parts.merge(ITEMS, [])


@pytest.mark.parametrize("number", range(1, 10))
def test_merge_that_is_killed_at_any_point_is_repeated(tmp_path: Path, number: int) -> None:
    """Points: creation and rename of the file, creation and rename of the manifest, the deletion of each part."""
    fill(parts_of(tmp_path), range(4))
    process = multiprocessing.get_context("fork").Process(target=merge_until_killed, args=(tmp_path, number))
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if number <= 6 else 0)
    parts = parts_of(tmp_path)
    _, missing = parts.open()
    assert missing == ([] if number <= 4 else None)
    assert parts.path.exists() == (number > 2)
    assert parts.merge(ITEMS, []) == [] if missing == [] else parts.path.exists()
    assert [line["item"] for line in lines(parts.path)] == ITEMS
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and ".parts" not in path.parts[-2]) == [
        "a.jsonl"
    ]


def test_start_that_is_killed_while_it_writes_the_manifest_leaves_nothing(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    parts.folder.mkdir()
    (parts.folder / ".manifest.json.1.abc.tmp").write_text('{"version"')
    assert parts.open()[1] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["a.jsonl", "a[1].jsonl"])
def test_start_deletes_the_temporary_files_of_killed_merges(tmp_path: Path, name: str) -> None:
    parts = ResultParts(tmp_path / name, parts_of(tmp_path)._plan)
    with atomic_writer(parts.path):
        (left,) = tmp_path.iterdir()
        os.link(left, left.with_stem(f"{left.stem}0"))  # what would be there, had the process been killed now
    parts.path.unlink()
    others = [tmp_path / ".b.jsonl.1.tmp", tmp_path / f"{name}.tmp"]
    for other in others:
        other.touch()
    parts.open()
    assert {path for path in tmp_path.iterdir() if path.is_file()} == set(others)


def test_merge_without_room_on_the_disk_keeps_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(tmp_path)
    fill(parts, range(4))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hpcaccel.core.durable_files.os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            parts.merge(ITEMS, [])
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl.parts"]
    assert parts.open()[1] == []
    assert parts.merge(ITEMS, []) == []
    assert len(lines(parts.path)) == len(ITEMS)


def merge_with_few_handles(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    items = list(range(6000))
    parts = ResultParts(folder / "a.jsonl", Plan.of(items, batch_size=2, settings={}))
    parts.open()
    assert parts.merge(items, []) == []


def test_merge_of_many_batches_and_parts_needs_few_handles(tmp_path: Path) -> None:
    folder = tmp_path / "a.jsonl.parts"
    folder.mkdir()
    for part in range(300):
        text = "".join(f'{{"batch":{batch},"results":[{batch},"b"]}}\n' for batch in range(part, 3000, 300))
        (folder / f"20260101-000000-{part:04x}-00000.jsonl").write_text(text)
    process = multiprocessing.get_context("fork").Process(target=merge_with_few_handles, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    found = lines(tmp_path / "a.jsonl")
    assert [line["item"] for line in found] == list(range(6000))
    assert [line["result"] for line in found[::2]] == list(range(3000))


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}])
def test_result_that_json_has_no_number_for_is_an_error_that_names_the_item(tmp_path: Path, value: Any) -> None:
    part = tmp_path / "part.jsonl"
    with pytest.raises(RuntimeMisuse, match=r"result 1 of batch 3 \(item 7\) cannot .*for NaN or infinity None"):
        append_results(part, 3, [1.0, value], first=6)
    assert not part.exists()
    with pytest.raises(RuntimeMisuse, match="item 0 cannot be written as JSON"):
        Plan.of([value], batch_size=1, settings={})


def test_changed_text_of_an_item_is_an_error(tmp_path: Path) -> None:
    fill(parts_of(tmp_path), range(1))
    other = ResultParts(tmp_path / "a.jsonl", Plan.of(["x", *ITEMS[1:]], batch_size=2, settings={}))
    with pytest.raises(RuntimeMisuse, match="the order or the text of some items has changed"):
        other.open()


def test_no_items_are_an_empty_file(tmp_path: Path) -> None:
    parts = ResultParts(tmp_path / "a.jsonl", Plan.of([], batch_size=2, settings={}))
    assert parts.open()[1] == []
    assert parts.merge([], []) == []
    assert parts.path.read_bytes() == b""


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]
