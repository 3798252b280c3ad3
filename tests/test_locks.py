"""Locks on files, and JSON lines over a pipe."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.durable_files import LineSplitter, json_line, lock_file, objects_in, write_all


def test_a_lock_is_held_until_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("a") as first, path.open("a") as second:
        assert lock_file(first) == "held"
        assert lock_file(second, wait=False) == "busy"
        first.close()
        assert lock_file(second, wait=False) == "held"


def test_shared_locks_exclude_only_exclusive_ones(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("a") as first, path.open("a") as second, path.open("a") as third:
        assert [lock_file(first, shared=True), lock_file(second, shared=True, wait=False)] == ["held", "held"]
        assert lock_file(third, wait=False) == "busy"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_unsupported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(code))
    with (tmp_path / "lock").open("a") as file:
        assert lock_file(file) == "unsupported"


def test_other_errors_of_flock_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    with (tmp_path / "lock").open("a") as file, pytest.raises(OSError, match=os.strerror(errno.EIO)):
        lock_file(file)


def failing(code: int) -> Any:
    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    return flock


def test_line_splitter_joins_pieces_into_lines() -> None:
    lines = LineSplitter()
    assert [lines.feed(piece) for piece in (b'{"a"', b": 1}\n{", b"}\n\n", b"x")] == [
        [],
        [b'{"a": 1}'],
        [b"{}", b""],
        [],
    ]


def test_write_all_writes_data_larger_than_the_pipe() -> None:
    source, sink = os.pipe()
    data = json_line({"text": "x" * (1 << 20)})
    pid = os.fork()
    if pid == 0:
        os.close(source)
        write_all(sink, data)
        os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb") as file:
        assert file.read() == data
    assert os.waitpid(pid, 0)[1] == 0


def test_objects_in_finds_json_objects_among_other_output() -> None:
    output = b'Welcome to n1\n{"node": "n1", "problem": null}\n[1]\n{"other": 1}\n{"node": "n2"}\n\xff'
    assert [found["node"] for found in objects_in(output, keys={"node"})] == ["n1", "n2"]
