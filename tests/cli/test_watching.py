"""``status --watch``: each page replaces the one before."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hpcaccel.cli import follow


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_page_stays_until_the_next_one_is_complete(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = stream(), stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(follow, "LOOK_SECONDS", 0.0)
    states = iter([False, True])
    run: Any = SimpleNamespace(status=lambda **_: SimpleNamespace(ended=next(states)))
    shown = []

    def show() -> None:
        shown.append(out.getvalue())
        assert sys.stdout.isatty() == out.isatty()
        print(f"page {len(shown)}")
        print("a note", file=sys.stderr)

    follow.watch_status(run, show)
    first, between = ("\x1b[H\x1b[2J", "\x1b[H\x1b[2J") if out.isatty() else ("", "\n")
    assert shown == ["", f"{first}page 1\n"]
    assert out.getvalue() == f"{first}page 1\n{between}page 2\n"
    assert err.getvalue() == "a note\n" * 2
