"""Tests of where the loggers ``hpcaccel.*`` of the batch step write, and how a program or a user can change that."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcaccel.core.log import LEVEL, NodeHandler, configure, log_always, set_log_file, set_mask

from .conftest import LocalRun

LINE = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
log = logging.getLogger("hpcaccel.node.test")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tree = logging.getLogger("hpcaccel")
    handlers, level = tree.handlers[:], tree.level
    monkeypatch.delenv(LEVEL, raising=False)
    tree.setLevel(logging.NOTSET)
    yield
    tree.handlers[:] = handlers
    tree.setLevel(level)


def test_each_line_is_written_to_the_output_and_the_attempts_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure()
    configure()  # a second time changes nothing
    set_log_file(tmp_path / "supervisor.log")
    log.info("attempt %d: %s", 1, "ranks: 2")
    log.debug("not wanted")
    output = capsys.readouterr()
    assert re.fullmatch(rf"hpcaccel: {LINE} attempt 1: ranks: 2\n", output.out)
    assert output.err == ""
    assert f"hpcaccel: {(tmp_path / 'supervisor.log').read_text()}" == output.out


def test_secrets_are_masked_in_the_output_and_the_attempts_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure()
    set_log_file(tmp_path / "supervisor.log")
    set_mask(lambda text: text.replace("s3cr3t", "***"))
    log.info("the token is %s", "s3cr3t")
    assert "s3cr3t" not in capsys.readouterr().out + (tmp_path / "supervisor.log").read_text()


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_loses_only_the_log_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configure()
    set_log_file(Path("/dev/full"))
    log.info("here")
    assert "here\nhpcaccel: cannot write /dev/full: No space left on device\n" in capsys.readouterr().out
    set_log_file(tmp_path / "supervisor.log")
    monkeypatch.setattr(sys, "stdout", FullDisk())
    log.info("there")
    assert "there" in (tmp_path / "supervisor.log").read_text()


def test_configure_can_log_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    configure(to_stderr=True)
    log.info("importing")
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.endswith(" importing\n")


@pytest.mark.parametrize(("level", "levels"), [("debug", "DIW"), ("INFO", "IW"), ("warning", "W"), ("30", "W")])
def test_log_level_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], level: str, levels: str
) -> None:
    monkeypatch.setenv(LEVEL, level)
    configure()
    for write, text in ((log.debug, "D"), (log.info, "I"), (log.warning, "W")):
        write(text)
    assert "".join(line[-1] for line in capsys.readouterr().out.splitlines()) == levels


def test_invalid_log_level_is_reported_and_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LEVEL, "loud")
    configure()
    log.info("here")
    first, second = capsys.readouterr().out.splitlines()
    assert (
        "HPCACCEL_LOG_LEVEL=loud is not a log level (allowed: debug, info, warning, error, critical, or a number)"
        in first
    )
    assert second.endswith(" here")


def test_logging_configuration_of_a_program_is_kept(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log levels, and its handlers on the root logger or on ours."""
    own: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: own.append(record.getMessage())  # type: ignore[method-assign]
    tree = logging.getLogger("hpcaccel")
    tree.addHandler(handler)
    tree.setLevel(logging.WARNING)
    configure()
    log.info("quiet")
    log.warning("loud")
    assert own == ["loud"]
    assert caplog.messages == ["loud"], "the root logger's handlers get it too"
    assert [line[-4:] for line in capsys.readouterr().out.splitlines()] == ["loud"]
    assert logging.getLogger().level == logging.WARNING


def test_no_handler_is_attached_without_configure(capsys: pytest.CaptureFixture[str]) -> None:
    log.info("nobody has configured anything")
    assert not [one for one in logging.getLogger("hpcaccel").handlers if isinstance(one, NodeHandler)]
    assert capsys.readouterr().out == ""


def test_run_logs_at_the_level_from_the_environment(
    local_run: Callable[..., LocalRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line of an attempt in slurm.log is always written, because the classification looks for it."""
    monkeypatch.setenv(LEVEL, "error")
    run = local_run("print('well')")
    assert run.run() == 0
    (line,) = run.log.splitlines()
    assert re.fullmatch(rf"hpcaccel: {LINE} attempt 1: ranks: 1, nodes: 1, checkpoint: none", line)
    assert f"hpcaccel: {run.dir.supervisor_log(1).read_text()}" == f"{line}\n"


def test_log_always_writes_at_every_level(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(LEVEL, "critical")
    configure()
    log_always(log, "attempt 1: 100% of it")
    assert capsys.readouterr().out.endswith(" attempt 1: 100% of it\n")
