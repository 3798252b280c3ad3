"""Reader of logged metrics: hpcaccel's own lines, and those that programs append to ``$HPCACCEL_METRICS``."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import append_line
from hpcaccel.core.metrics_reader import Logged
from hpcaccel.core.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    run.attempt(1).mkdir()
    return run


def append(run: RunDir, text: str | bytes, *, attempt: int = 1) -> None:
    run.attempt(attempt).mkdir(exist_ok=True)
    with run.foreign_metrics(attempt).open("ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


def ours(run: RunDir, step: int, *, attempt: int, **values: float) -> None:
    append_line(run.metrics, {"step": step, "attempt": attempt, "time": 1.0, "values": values})


def read(logged: Logged) -> list[tuple[int, int, dict[str, float]]]:
    return [(line.attempt, line.step, line.values) for line in logged.read()]


def test_lines_appended_by_a_program_are_read(run: RunDir) -> None:
    append(run, '{"step": 3, "loss": 0.5, "time": 12.5, "note": "warm"}\n{"step": 4.0, "loss": 1}\n')
    logged = Logged(run)
    first, second = logged.read()
    assert (first.step, first.time, first.values) == (3, 12.5, {"loss": 0.5})
    assert (second.step, second.values) == (4, {"loss": 1.0})
    assert second.time == pytest.approx(run.foreign_metrics(1).stat().st_mtime)
    assert logged.warning == ""
    assert logged.read() == []


def test_lines_without_a_step_get_consecutive_steps(run: RunDir) -> None:
    append(run, '{"loss": 3}\n{"loss": 2}\n{"step": 10, "loss": 1}\n')
    logged = Logged(run)
    assert [step for _, step, _ in read(logged)] == [1, 2, 10]
    append(run, '{"loss": 0}\n')
    append(run, '{"loss": 9}\n', attempt=2)
    assert read(logged) == [(1, 11, {"loss": 0.0}), (2, 1, {"loss": 9.0})]


def test_nan_and_infinity_are_read_as_values(run: RunDir) -> None:
    append(run, '{"step": 1, "loss": NaN, "norm": Infinity}\n')
    ((_, _, values),) = read(Logged(run))
    assert math.isnan(values["loss"])
    assert values["norm"] == math.inf


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"step": 1, "loss": 0.5', 'not JSON: \'{"step": 1, "loss": 0.5\''),
        (b"loss 0.5", "not JSON: 'loss 0.5'"),
        (b"[" * 60_000, "not JSON: '[[["),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1, 2]", "not a JSON object: [1, 2]"),
        (b'{"step": 1, "loss": "0.5"}', "no metric is a number"),
        (b'{"step": 1, "loss": {"train": 0.5}}', "no metric is a number"),
        (b'{"step": 1, "ok": true}', "no metric is a number"),
        (b'{"step": 1, "loss": 1' + b"0" * 400 + b"}", "no metric is a number"),
        (b'{"step": 1}', "no metric is a number"),
        (b'{"step": "1", "loss": 0.5}', "step is '1'; it must be an integer, 0 or more"),
        (b'{"step": -1, "loss": 0.5}', "step is -1; it must be"),
        (b'{"step": 1.5, "loss": 0.5}', "step is 1.5; it must be"),
        (b'{"step": NaN, "loss": 0.5}', "step is nan; it must be"),
        (b'{"step": true, "loss": 0.5}', "step is True; it must be"),
        (b'{"loss": 0.5, "text": "' + b"x" * 70_000 + b'"}', "line longer than 64 KiB"),
    ],
)
def test_unusable_line_is_skipped_with_a_warning(run: RunDir, line: bytes, words: str) -> None:
    append(run, b'{"step": 1, "loss": 3}\n\n' + line + b'\n{"step": 2, "loss": 2}\n')
    logged = Logged(run)
    assert read(logged) == [(1, 1, {"loss": 3.0}), (1, 2, {"loss": 2.0})]
    where = f"1 line was skipped: line 3 of {run.foreign_metrics(1)}: "
    assert logged.warning.startswith(where + words)
    append(run, line + b"\n")
    logged.read()
    assert logged.warning.startswith("2 lines were skipped; the first one: line 3 of ")


def test_metrics_that_are_not_numbers_are_recorded(run: RunDir) -> None:
    append(run, '{"step": 1, "loss": "0.5", "acc": 0.1}\n{"step": 2, "loss": "0.4", "parts": {"a": 1}, "acc": 0.2}\n')
    logged = Logged(run)
    assert [values for _, _, values in read(logged)] == [{"acc": 0.1}, {"acc": 0.2}]
    assert logged.no_numbers == {"loss": "'0.5'", "parts": "{'a': 1}"}


def test_line_without_newline_is_read_once_its_json_is_complete(run: RunDir) -> None:
    logged = Logged(run)
    append(run, '{"step": 1, "lo')
    assert read(logged) == []
    append(run, 'ss": 1}')
    assert read(logged) == [(1, 1, {"loss": 1.0})]
    append(run, '\n{"step": 2, "loss": 2}\r\n')
    assert read(logged) == [(1, 2, {"loss": 2.0})]
    assert logged.warning == ""


def test_incomplete_line_above_the_limit_is_skipped_as_one_line(run: RunDir) -> None:
    logged = Logged(run)
    for _ in range(3):
        append(run, "x" * 100_000)
        assert read(logged) == []
    append(run, '\n{"loss": 1}\n')
    assert read(logged) == [(1, 1, {"loss": 1.0})]
    assert logged.passed_over == 1


def test_file_that_was_overwritten_is_read_from_the_start(run: RunDir) -> None:
    logged = Logged(run)
    append(run, '{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n')
    logged.read()
    run.foreign_metrics(1).write_text('{"step": 3, "loss": 3}\n')
    assert read(logged) == [(1, 3, {"loss": 3.0})]


def test_own_and_appended_lines_are_ordered_by_attempt(run: RunDir) -> None:
    for attempt in (1, 2):
        ours(run, attempt, attempt=attempt, loss=attempt)
        append(run, json.dumps({"step": 10 * attempt, "acc": attempt}) + "\n", attempt=attempt)
    append(run, '{"step": 5, "acc": 1, "attempt": 7}\n', attempt=10)
    assert [(attempt, step) for attempt, step, _ in read(Logged(run))] == [(1, 1), (1, 10), (2, 2), (2, 20), (10, 5)]


def test_last_lines_of_an_attempt_are_read_after_the_next_has_started(run: RunDir) -> None:
    logged = Logged(run)
    append(run, '{"loss": 1}\n')
    assert len(logged.read()) == 1
    append(run, '{"loss": 2}\n')
    append(run, '{"loss": 3}\n', attempt=2)
    assert read(logged) == [(1, 2, {"loss": 2.0}), (2, 1, {"loss": 3.0})]
    append(run, '{"loss": 4}\n', attempt=2)
    assert read(logged) == [(2, 2, {"loss": 4.0})]


def test_surrogates_in_metric_names_are_escaped(run: RunDir) -> None:
    append(run, '{"lo\\ud800ss": 1, "größe": 2}\n')
    ((_, _, values),) = read(Logged(run))
    assert values == {"lo\\ud800ss": 1.0, "größe": 2.0}
