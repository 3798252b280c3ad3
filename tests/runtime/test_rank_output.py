"""Output of forked ranks, where this process's streams are not files."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

import pytest

from hpcaccel.runtime.rank_output import rank_output


def fork(function: Callable[[], None], *, rank: int) -> None:
    """Call the function in a forked process, and wait for its end."""
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        return
    try:
        os.environ.update(RANK=str(rank + 10), LOCAL_RANK=str(rank))
        function()
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        os._exit(1)


def collected(monkeypatch: pytest.MonkeyPatch, stream: object, write: Callable[[], None], prefix: str | None) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    with rank_output(2, prefix) as output:
        assert output is not None

        def be_rank() -> None:
            output.connect_rank()
            write()

        for rank in range(2):
            fork(be_rank, rank=rank)


def test_more_than_a_pipe_holds_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    collected(monkeypatch, stream := io.StringIO(), lambda: print("ä" * 200_000), None)
    assert stream.getvalue().count("ä") == 400_000
    assert stream.getvalue().count("\n") == 2


def test_prefix_has_rank_and_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    collected(
        monkeypatch, stream := io.StringIO(), lambda: print("a\n\nb", end=""), "${role_name} ${rank}/${local_rank}$ "
    )
    lines = stream.getvalue().splitlines()
    assert sorted(lines) == sorted(f"default 1{rank}/{rank}$ {text}" for rank in range(2) for text in ("a", "", "b"))


def test_characters_that_the_stream_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    collected(monkeypatch, io.TextIOWrapper(buffer, encoding="ascii", write_through=True), lambda: print("→"), None)
    assert buffer.getvalue() == rb"\u2192" b"\n" rb"\u2192" b"\n"


def test_ranks_do_not_hang_if_the_stream_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closing(io.StringIO):
        def write(self, text: str) -> int:
            self.close()
            return 0

    stream = Closing()
    collected(monkeypatch, stream, lambda: print("x" * 300_000), None)
    assert stream.closed


def test_files_are_used_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(1, "w", closefd=False) as out, open(2, "w", closefd=False) as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with rank_output(2, None) as output:
            assert output is None
