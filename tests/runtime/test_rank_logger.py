"""Loggers: which ranks write, in which order, with which prefix, and which source line a record names."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.logging import MultiProcessAdapter, get_logger
from hpcaccel.runtime.rank_logger import TRAINING_LOG, configure_training_log
from tests.runtime.ranks import run_ranks


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "HPCACCEL_LOG_LEVEL", "ACCELERATE_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def test_logger_of_a_single_process_writes_like_a_plain_logger(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("t.alone", log_level="info")
    logger.debug("hidden")
    logger.info("seen %d", 3, extra={"colour": "red"})
    logger.warning("of this rank", main_process_only=False)
    assert caplog.messages == ["seen 3", "[rank 0] of this rank"]
    assert caplog.records[0].colour == "red"  # type: ignore[attr-defined]


def test_other_ranks_write_only_on_request(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    as_rank(monkeypatch, 3)
    logger = get_logger("t.third")
    logger.warning("not heard")
    logger.warning_once("not heard either")
    logger.warning("heard", main_process_only=False)
    logger.warning("heard too", in_order=True)
    assert caplog.messages == ["[rank 3] heard", "[rank 3] heard too"]


def test_log_records_name_the_callers_line(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("t.lines", "DEBUG")

    def say(stacklevel: int) -> None:
        logger.warning_once("a helper's words", stacklevel=stacklevel)

    first = sys._getframe().f_lineno
    logger.info("one")
    logger.log(logging.INFO, "two")
    logger.warning_once("three")
    logger.info("four", in_order=True)
    say(2)
    try:
        raise ValueError
    except ValueError:
        logger.exception("six")
    assert [record.lineno - first for record in caplog.records] == [1, 2, 3, 4, 5, 9]
    assert {record.pathname for record in caplog.records} == {__file__}


def test_warning_once_writes_each_message_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("t.once")
    for value in ([1], [1], [2]):
        logger.warning_once("careful: %s", value)
    get_logger("t.once").warning_once("careful: %s", [2])
    assert caplog.messages == ["careful: [1]", "careful: [2]"]


def test_log_level_comes_from_the_call_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_logger("t.none").logger.level == logging.NOTSET
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
    assert get_logger("t.theirs").logger.level == logging.ERROR
    monkeypatch.setenv("HPCACCEL_LOG_LEVEL", "INFO")
    assert get_logger("t.ours").logger.level == logging.INFO
    assert logging.getLogger().level == logging.INFO
    logger = get_logger("t.call", log_level="DEBUG")
    assert logger.isEnabledFor(logging.DEBUG)
    assert isinstance(logger, MultiProcessAdapter)


def test_unknown_log_level_is_refused() -> None:
    with pytest.raises(RuntimeMisuse, match="unknown log level 'LOUD'"):
        get_logger("t.loud", log_level="LOUD")


def test_logging_does_not_import_torch() -> None:
    code = (
        "import sys; from hpcaccel.logging import get_logger\n"
        "get_logger('x').warning('heard'); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "heard\n")


@pytest.mark.torch
def test_two_ranks_log_in_order_with_their_prefixes() -> None:
    ended = run_ranks("logger.py")
    assert ended.codes == [0, 0], ended.outputs
    source = (Path(__file__).parent / "programs" / "logger.py").read_text().splitlines()
    number = {line.split('"')[1]: index for index, line in enumerate(source, 1) if "logger.info(" in line}

    def line(text: str, rank: int | None = None) -> str:
        prefix = "" if rank is None else f"[rank {rank}] "
        key = text.replace("one of 2", "one of %d")
        return f"INFO logger.py:{number['turn %d' if text.startswith('turn') else key]} {prefix}{text}"

    spoken = [[one for one in output.splitlines() if one.startswith("INFO logger.py")] for output in ended.outputs]
    heard = [[one.rpartition(" @")[0] for one in lines] for lines in spoken]
    turns = [f"turn {index}" for index in range(3)]
    assert heard[0] == [
        line("before, on one"),
        line("before, on all", 0),
        line("before, in order", 0),
        line("one of 2"),
        line("all", 0),
        *(line(turn, 0) for turn in turns),
        line("hidden on one rank", 0),
        line("after the end"),
    ]
    assert heard[1] == [
        line("before, on all", 1),
        line("before, in order", 1),
        line("all", 1),
        *(line(turn, 1) for turn in turns),
    ]
    when = [[float(one.rpartition(" @")[2]) for one in lines if "turn" in one] for lines in spoken]
    in_turn = [moment for pair in zip(*when, strict=True) for moment in pair]
    assert in_turn == sorted(in_turn)


# -- the log of the training -------------------------------------------------------------------------------------------


@pytest.fixture
def training_log() -> Iterator[logging.Logger]:
    """The training's logger in the state of a new process."""
    package, logger = logging.getLogger("hpcaccel"), logging.getLogger(TRAINING_LOG)
    before = [(one, one.level, one.propagate, one.handlers[:], one.filters[:]) for one in (package, logger)]
    for one in (package, logger):
        one.level, one.propagate = logging.NOTSET, True
        one.handlers.clear()
        one.filters.clear()
    logger.setLevel(logging.NOTSET)  # also clears the cache of enabled levels
    yield logger
    for one, level, propagate, handlers, filters in before:
        one.propagate, one.handlers[:], one.filters[:] = propagate, handlers, filters
        one.setLevel(level)


def test_training_log_has_a_prefix_and_sends_errors_to_stderr(
    training_log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_training_log(0)
    configure_training_log(0)  # by the next training in the same process
    training_log.info("resumed at step %d", 7)
    training_log.error("another rank aborted first")
    assert capsys.readouterr() == ("hpcaccel: resumed at step 7\n", "hpcaccel: another rank aborted first\n")


def test_training_log_of_other_ranks_has_errors_only(
    training_log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_training_log(3)
    training_log.info("resumed at step 7")
    training_log.warning("resumed at step 7")
    training_log.error("another rank aborted first")
    assert capsys.readouterr() == ("", "hpcaccel: another rank aborted first\n")


@pytest.mark.parametrize(
    ("level", "shown"), [("warning", ""), ("10", "hpcaccel: shown\n"), ("INFO", "hpcaccel: shown\n")]
)
def test_training_log_level_comes_from_the_environment(
    training_log: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: str,
    shown: str,
) -> None:
    monkeypatch.setenv("HPCACCEL_LOG_LEVEL", level)
    configure_training_log(0)
    training_log.info("shown")
    assert capsys.readouterr().out == shown


def test_unknown_training_log_level_is_ignored_with_a_warning(
    training_log: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCACCEL_LOG_LEVEL", "LOUD")
    configure_training_log(0)
    training_log.info("shown")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("hpcaccel: HPCACCEL_LOG_LEVEL is ignored: unknown log level 'LOUD'")
    assert second == "hpcaccel: shown"


@pytest.mark.parametrize("name", ["hpcaccel", TRAINING_LOG])
def test_programs_own_handler_replaces_the_default_handler(
    training_log: logging.Logger, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    configure_training_log(0)
    training_log.info("resumed at step 7")
    assert capsys.readouterr().out == ""
    assert [(record.getMessage(), record.rank) for record in records] == [  # type: ignore[attr-defined]
        ("resumed at step 7", 0)
    ]


def test_log_level_set_by_the_program_is_kept(training_log: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_training_log(0)
    logging.getLogger("hpcaccel").setLevel(logging.WARNING)
    training_log.info("hidden")
    configure_training_log(0)
    training_log.info("hidden")
    assert capsys.readouterr().out == ""
