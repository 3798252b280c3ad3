"""Tests of the batch step's exit code with expedited requeue: 0, as Slurm requeues and holds a job with any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.node.__main__ import main


@pytest.mark.parametrize(("words", "code"), [("batch", 0), ("supervise", 1)])
def test_only_the_batch_step_replaces_its_exit_code_by_zero(
    words: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: list[str]) -> int:
        return 1

    monkeypatch.setenv("HPCACCEL_EXPEDITE", "1")
    monkeypatch.setattr("hpcaccel.node.__main__._dispatch", fails)
    with pytest.raises(SystemExit) as ended:
        main([words, "supervise", str(tmp_path)])
    assert ended.value.code == code
    assert ("exit code 1, reported to Slurm as 0" in capsys.readouterr().out) is (code == 0)


def test_crashed_batch_step_exits_with_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crashes(_: list[str]) -> int:
        raise ZeroDivisionError("here")

    monkeypatch.setattr("hpcaccel.node.__main__._dispatch", crashes)
    with pytest.raises(ZeroDivisionError):
        main(["batch", "supervise", str(tmp_path)])
    monkeypatch.setenv("HPCACCEL_EXPEDITE", "1")
    with pytest.raises(SystemExit) as ended:
        main(["batch", "supervise", str(tmp_path)])
    assert ended.value.code == 0
    assert "ZeroDivisionError: here" in capsys.readouterr().err
