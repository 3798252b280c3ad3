"""Keys of interrupted commands: reused by a repeated command, and removed once old."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from hpcaccel.submission.submit.comparison import PendingKey, command_key, pending_key
from hpcaccel.submission.submit.idempotent import Once


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "hpcaccel"


def cut_off(stack: ExitStack) -> PendingKey:
    return stack.enter_context(pending_key("commands", {"of": 1}, kept_seconds=3600.0))


def test_interrupted_command_is_repeated_before_a_new_one_starts() -> None:
    with ExitStack() as first:
        first_key = cut_off(first)
        with ExitStack() as second:
            second_key = cut_off(second)
        first_key.done = True
    with ExitStack() as again:
        asked = cut_off(again)
        assert (asked.key, asked.is_repeated) == (second_key.key, True)
        other = cut_off(again)
        assert other.key not in (first_key.key, second_key.key)
        asked.done = other.done = True
    with ExitStack() as at_last:
        assert not cut_off(at_last).is_repeated


def test_old_command_keys_are_removed(state: Path) -> None:
    with ExitStack() as stack:
        cut_off(stack)
    for folder in ("submissions", "keys"):
        (state / folder).mkdir()
        for name in ("a" * 32 + "-0.json", "a" * 32 + "-0.lock"):
            (state / folder / name).write_text("{}")
    for path in state.glob("*/*"):
        os.utime(path, (1.0, 1.0))
    with command_key({"of": 2}) as asked, Once(asked.key):
        pass
    with ExitStack() as stack:
        assert not cut_off(stack).is_repeated
    assert [path.name for path in [*state.glob("submissions/*"), *state.glob("keys/*")]] == []
